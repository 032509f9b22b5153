"""Lower the layers of one stage to the operations of its group of ranks.

alive, losses, results   which layers there are to compute
assign                   where every value lives
extents                  how much of it each rank makes, and what its readers want
needs                    the boxes of operands, once for layers that repeat
this file                the operations: computations, and regrids where what is made is not what is wanted
slices, margins          what ranks hold of the weights; room for padding
rectified                batch norms that rectify what they make
landing                  values that are made inside the result of a regrid
alike                    which ranks do the same in an operation, for those who price it
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from shardwise.geometry import Box, Layout, messages
from shardwise.graph import Graph, Kind, Layer, Operand, Source
from shardwise.plan import Split
from shardwise.program.alive import alive
from shardwise.program.assign import Home, assign
from shardwise.program.extents import Extents, Key, Need, find_extents, key_of
from shardwise.program.landing import landed
from shardwise.program.losses import expand_losses
from shardwise.program.margins import margins_of
from shardwise.program.norms import shared_over
from shardwise.program.ops import Compute, Held, Normalise, Op, Regrid, StageProgram
from shardwise.program.rectified import rectified
from shardwise.program.results import whole_results
from shardwise.program.slices import slices_of


def lower_stage(
    graph: Graph,
    layers: Sequence[Layer],
    split: Split,
    *,
    departures: Collection[str],
    tail: str = "auto",
    batch_norm: str = "sync",
    halo: str = "layer",
    samples: int | None = None,
    differentiable: Collection[str] = (),
    shared: bool = False,
) -> StageProgram:
    """Return what a group of `split.width` ranks does to compute `layers`.

    Args:
        graph: the network, for the micro-batch that the group works on.
        layers: the layers of the stage, in order.
        split: how they are split over the ranks.
        departures: values that are wanted outside of the stage.
        tail: what happens behind the last tiled layer.
        batch_norm: whether statistics are shared (`sync`) or each rank's own (`local`).
        halo: how many layers share one exchange: `layer` (one), a number, `fused` or `auto` (see `extents`).
        samples: the samples of this micro-batch over all data replicas; None if there is one replica.
        differentiable: values from outside that need a gradient.
        shared: whether other replicas or micro-batches have shares of the same mini-batch.
    """
    work = expand_losses(whole_results(alive(layers, departures)), shared=shared)
    homes = assign(graph, work, split, tail)
    sync = batch_norm != "local"
    extents = find_extents(work, homes, split.width, halo, sync=sync, replicated=samples is not None)
    lowering = _Lowering(graph, homes, extents, split.width, sync, samples, frozenset(differentiable))
    return lowering.run(work, departures)


class _Lowering:
    def __init__(
        self,
        graph: Graph,
        homes: dict[str, Home],
        extents: Extents,
        width: int,
        sync: bool,
        samples: int | None,
        differentiable: frozenset[str],
    ) -> None:
        self.graph, self.homes, self.width = graph, homes, width
        self.outs, self.needs, self.wants = extents.outs, extents.needs, extents.wants
        self.known = extents.known
        # Most layers hold what others do: equal layouts are one object, which is soon compared.
        self.layouts: dict[tuple[object, ...], Layout] = {}
        self.sync, self.samples = sync, samples
        self.grads = {name: name in differentiable for name in homes}
        self.made: dict[str, Held] = {}
        self.brought: dict[tuple[str, Key], Held] = {}
        self.ops: list[Op] = []
        self.arrivals: dict[str, Held] = {}
        self.parameters: dict[str, Layout] = {}
        self.buffers: dict[str, Layout] = {}

    def run(self, layers: Sequence[Layer], departures: Collection[str]) -> StageProgram:
        for layer in layers:
            if layer.kind is not Kind.INPUT:
                self._emit(layer)
        leaving = {name: self._complete(name) for name in departures if name in self.made}
        outside = [held.slot for held in leaving.values()]
        stored = {**self.parameters, **self.buffers}
        return StageProgram(
            landed(rectified([_settled(op, stored) for op in self.ops], outside), outside),
            self.arrivals,
            leaving,
            self.parameters,
            self.buffers,
            self.width,
            self.graph.frozen,
        )

    def _emit(self, layer: Layer) -> None:
        home = self.homes[layer.name]
        reads = tuple(self._read(layer, o) for o in layer.operands)
        wants = self._wants(layer, reads)
        owned = home.cuts.layout(self.width)
        if home.sums:
            layout = self._layout(owned.shape, (Box.whole(owned.shape),) * self.width, partial=True)
        else:
            layout = self._layout(owned.shape, self.outs[layer.name])
        grad = any(made.is_float for made in layer.outputs) and any(r.grad for r in reads)
        self.grads[layer.name] = grad
        makes = Held(layer.name, layer.name, layout, layer.outputs[0], grad)
        self.made[layer.name] = makes
        synced = self.sync or layer.op != "batch_norm"
        over = shared_over(layer, home, self.samples is not None) if synced else ""
        if over:
            samples = layer.shape[0] if self.samples is None else self.samples * self._rows(layer)
            self.ops.append(Normalise(layer, reads, wants, makes, owned, samples, over))
        else:
            self.ops.append(Compute(layer, reads, wants, makes))

    def _rows(self, layer: Layer) -> int:
        """Return how many rows of a value belong to each sample: more than one where frames are folded in."""
        graph = self.graph if self.graph.batch else self.graph.with_batch(1)
        shape = layer.shape if self.graph.batch else graph[layer.name].shape
        return max(1, shape[0] // graph.batch) if shape else 1

    def _wants(self, layer: Layer, reads: Sequence[Held]) -> tuple[Layout, ...]:
        """Return for each operand which part of what is held the layer needs."""
        index, result = 0, []
        for operand, held in zip(layer.operands, reads, strict=True):
            if operand.origin is not Source.VALUE:
                result.append(held.layout)
                continue
            result.append(self._layout(operand.spec.shape, self.wants[layer.name, index]))
            index += 1
        return tuple(result)

    def _read(self, layer: Layer, operand: Operand) -> Held:
        if operand.origin is not Source.VALUE:
            return self._read_parameter(layer, operand)
        key = (operand.source, key_of(layer, self.homes))
        if key not in self.brought:
            self.brought[key] = self._bring(operand, self.needs[key], key[1])
        return self.brought[key]

    def _bring(self, operand: Operand, need: Need, key: Key) -> Held:
        """Make a value available in the boxes that its readers want."""
        name = operand.source
        made = self.made.get(name)
        shape = operand.spec.shape
        wanted = self._layout(shape, need.boxes)
        count = sum(1 for value, _ in self.brought if value == name)
        slot = f"{name}@{count}" if count or made is not None else name
        if made is None:
            held = Held(name, slot, wanted, operand.spec, self.grads[name])
            self.arrivals[slot] = held
            return held
        held = self._regrid(made, wanted, slot, f"{_word(key)} readers of {name}")
        return held if held is made else self._with_margins(held, need)

    def _with_margins(self, held: Held, need: Need) -> Held:
        """Let a regrid leave room for the padding that local kernels cannot add on one side alone."""
        margins, regrid = margins_of(held, need.readers, self.outs), self.ops[-1]
        assert isinstance(regrid, Regrid)
        if margins is None or regrid.is_sum:
            # A sum of whole values has no room around it: its readers pad for themselves.
            return held
        self.ops.pop()
        held = replace(held, margins=margins)
        self.ops.append(replace(regrid, makes=held))
        return held

    def _regrid(self, made: Held, wanted: Layout, slot: str, why: str) -> Held:
        has, wants = made.layout.boxes, wanted.boxes
        if not made.layout.partial and (has == wants or all(map(Box.contains, has, wants))):
            return made
        held = Held(made.value, slot, wanted, made.spec, made.grad)
        self.ops.append(Regrid(made, held, messages(made.layout, wanted), why))
        return held

    def _complete(self, name: str) -> Held:
        """Return a value that leaves the stage, at home and free of partial sums."""
        made = self.made[name]
        home = self.homes[name].cuts.layout(self.width)
        return self._regrid(made, home, f"{name}@out", f"{name} leaves the stage")

    def _read_parameter(self, layer: Layer, operand: Operand) -> Held:
        """Return the slices that this layer needs; layers that share a weight may need different ones."""
        home, outs = self.homes[layer.name], self.outs[layer.name]
        layout = self._layout(operand.spec.shape, slices_of(layer, operand, home, outs, self.known))
        is_parameter = operand.origin is Source.PARAMETER
        store = self.parameters if is_parameter else self.buffers
        known = store.setdefault(operand.source, layout)
        if known is not layout:
            store[operand.source] = self._layout(
                layout.shape, tuple(map(Box.hull, known.boxes, layout.boxes))
            )
        trainable = is_parameter and operand.source not in self.graph.frozen
        return Held(operand.source, operand.source, layout, operand.spec, trainable)

    def _layout(self, shape: tuple[int, ...], boxes: tuple[Box, ...], *, partial: bool = False) -> Layout:
        """Return the layout of all ranks with these boxes, the same one for the same boxes."""
        key = (shape, boxes, partial)
        found = self.layouts.get(key)
        if found is None:
            found = self.layouts[key] = Layout(shape, boxes, tuple(range(self.width)), partial)
        return found


def _settled(op: Op, stored: Mapping[str, Layout]) -> Op:
    """Say of every weight what is held of it for all of its layers, now that they are known."""
    if isinstance(op, Regrid):
        return op
    reads = op.reads
    for i, (operand, held) in enumerate(zip(op.layer.operands, op.reads, strict=True)):
        if operand.origin is not Source.VALUE and held.layout is not stored[held.value]:
            reads = (*reads[:i], replace(held, layout=stored[held.value]), *reads[i + 1 :])
    return op if reads is op.reads else replace(op, reads=reads)


def _word(key: Iterable[int]) -> str:
    dims = tuple(key)
    if not dims:
        return "whole"
    if dims[0] == -1:
        return "summing"
    return "batch" if dims == (0,) else "channel" if dims == (1,) else "tiled"
