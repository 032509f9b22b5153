"""Lower the layers of one stage to the operations of its group of ranks.

Every value has a home, the boxes that the ranks own. What the readers need beyond that, the halo, either
travels (an exchange) or is made twice over by the rank that reads it (fusion: several layers share one
exchange). Walking the layers backwards decides it for each value, over the boxes of all ranks:

    made = home                      where an exchange happens, or nobody needs more
    made = hull(home, needed)        where the chain goes on
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.geometry import Box, Layout, Range, messages
from shardwise.geometry.access import needed, reach
from shardwise.graph import Graph, Kind, Layer, Operand, Source
from shardwise.plan import Split
from shardwise.program.assign import Home, assign
from shardwise.program.losses import expand_losses
from shardwise.program.ops import Compute, Held, Normalise, Op, Regrid, StageProgram
from shardwise.program.results import whole_results


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
        halo: how many layers share one exchange: `layer` (one), a number, or `fused` (while it pays).
        samples: the samples of this micro-batch over all data replicas; None if there is one replica.
        differentiable: values from outside that need a gradient.
        shared: whether other replicas or micro-batches have shares of the same mini-batch.
    """
    work = expand_losses(whole_results(_alive(layers, departures)), shared=shared)
    homes = assign(graph, work, split, tail)
    lowering = _Lowering(
        graph, work, homes, split.width, batch_norm, halo, samples, frozenset(differentiable)
    )
    return lowering.run(departures)


def _alive(layers: Sequence[Layer], departures: Collection[str]) -> list[Layer]:
    """Drop the layers that no departure depends on, unless they update buffers."""
    wanted = set(departures)
    result: list[Layer] = []
    for layer in reversed(layers):
        if layer.name in wanted or _updates(layer):
            wanted.update(layer.inputs)
            result.append(layer)
    return result[::-1]


def _updates(layer: Layer) -> bool:
    """Tell whether a layer changes buffers when it is computed."""
    if not layer.buffers:
        return False
    statistics = {"batch_norm": "batch_statistics", "instance_norm": "instance_statistics"}
    return layer.op == "module" or bool(layer.attributes.get(statistics.get(layer.op, ""), False))


@dataclass
class _Need:
    """What the readers of one kind want of a value: the hull of their boxes."""

    boxes: list[Box]
    readers: list[Layer]
    held: Held | None = None


class _Lowering:
    def __init__(
        self,
        graph: Graph,
        layers: Sequence[Layer],
        homes: dict[str, Home],
        width: int,
        batch_norm: str,
        halo: str,
        samples: int | None,
        differentiable: frozenset[str],
    ) -> None:
        self.graph, self.layers, self.homes, self.width = graph, layers, homes, width
        self.sync, self.halo, self.samples = batch_norm != "local", halo, samples
        self.outs: dict[str, tuple[Box, ...]] = {}
        self.depths: dict[str, int] = {}
        self.grads = {name: name in differentiable for name in homes}
        self.needs: dict[tuple[str, tuple[int, ...]], _Need] = {}
        self.made: dict[str, Held] = {}
        self.ops: list[Op] = []
        self.arrivals: dict[str, Held] = {}
        self.parameters: dict[str, Layout] = {}
        self.buffers: dict[str, Layout] = {}

    def run(self, departures: Collection[str]) -> StageProgram:
        by_name = {layer.name: layer for layer in self.layers}
        work = [layer for layer in self.layers if layer.kind is not Kind.INPUT]
        for layer in reversed(work):
            self.outs[layer.name] = self._extent(layer)
            self._collect(layer)
        for layer in work:
            self._emit(layer)
        leaving = {}
        for name in departures:
            if name in by_name and by_name[name].kind is not Kind.INPUT:
                leaving[name] = self._complete(name)
        return StageProgram(
            tuple(self.ops),
            self.arrivals,
            leaving,
            self.parameters,
            self.buffers,
            self.width,
            self.graph.frozen,
        )

    # What every reader needs.

    def _key(self, layer: Layer) -> tuple[int, ...]:
        """Name the way in which a layer reads its operands; readers with one key share one exchange."""
        home = self.homes[layer.name]
        return (-1, *home.reads[0].dims) if home.sums else home.cuts.dims

    def _extent(self, layer: Layer) -> tuple[Box, ...]:
        """Return which box of its output each rank makes: its home, or more where the halo is made twice."""
        home = self.homes[layer.name]
        boxes = home.cuts.layout(self.width).boxes
        need = self.needs.get((layer.name, home.cuts.dims))
        if need is None or home.sums or all(map(Box.contains, boxes, need.boxes)):
            return boxes
        wider = tuple(map(Box.hull, boxes, need.boxes))
        if not self._may_widen(layer, home) or not self._pays(boxes, wider, self.depths[layer.name]):
            self.depths[layer.name] = 0
            return boxes
        return wider

    def _may_widen(self, layer: Layer, home: Home) -> bool:
        """Tell whether a layer can make pixels that other ranks own: not if its statistics are its own."""
        own_statistics = layer.op in ("group_norm", "instance_norm") or (
            layer.op == "batch_norm" and layer.attributes["batch_statistics"]
        )
        shared = self.sync and _shared_over(layer, home, self.samples is not None) == "group"
        return len(layer.outputs) == 1 and (shared or not own_statistics)

    def _pays(self, boxes: Sequence[Box], wider: Sequence[Box], depth: int) -> bool:
        """Tell whether the chain behind a value goes on to its producer, or an exchange happens here.

        With `fused` it goes on while no rank makes more than a quarter more than it owns.
        """
        if self.halo == "layer":
            return False
        if self.halo.isdecimal():
            return depth < int(self.halo)
        return all(4 * wide.size <= 5 * own.size for own, wide in zip(boxes, wider, strict=True))

    def _collect(self, layer: Layer) -> None:
        """Note what the layer needs of each value that it reads."""
        for i, operand in enumerate(o for o in layer.operands if o.origin is Source.VALUE):
            boxes = self._wanted(layer, operand, i)
            name, key = operand.source, (operand.source, self._key(layer))
            if key in self.needs:
                known = self.needs[key].boxes
                self.needs[key].boxes = [a.hull(b) for a, b in zip(known, boxes, strict=True)]
                self.needs[key].readers.append(layer)
            else:
                self.needs[key] = _Need(boxes, [layer])
            depth = self.depths.get(layer.name, 0) + int(self._reaches_over(layer, operand))
            self.depths[name] = max(self.depths.get(name, 0), depth)

    def _reaches_over(self, layer: Layer, operand: Operand) -> bool:
        """Tell whether what a rank owns of the output needs more of the operand than it owns of that."""
        outs = self.homes[layer.name].cuts.layout(self.width).boxes
        held = self.homes[operand.source].cuts.layout(self.width).boxes
        needs = (needed(operand.access, operand.spec.shape, box) for box in outs)
        return not all(map(Box.contains, held, needs))

    def _wanted(self, layer: Layer, operand: Operand, index: int) -> list[Box]:
        home = self.homes[layer.name]
        if home.sums:
            return list(home.reads[index].layout(self.width).boxes)
        return [needed(operand.access, operand.spec.shape, box) for box in self.outs[layer.name]]

    # The operations.

    def _emit(self, layer: Layer) -> None:
        home = self.homes[layer.name]
        reads = tuple(self._read(layer, o) for o in layer.operands)
        wants = self._wants(layer, reads)
        owned = home.cuts.layout(self.width)
        layout = Layout(owned.shape, self.outs[layer.name], owned.ranks)
        if home.sums:
            layout = Layout(owned.shape, (Box.whole(owned.shape),) * self.width, owned.ranks, True)
        grad = any(made.is_float for made in layer.outputs) and any(r.grad for r in reads)
        self.grads[layer.name] = grad
        makes = Held(layer.name, layer.name, layout, layer.outputs[0], grad)
        self.made[layer.name] = makes
        synced = self.sync or layer.op != "batch_norm"
        over = _shared_over(layer, home, self.samples is not None) if synced else ""
        if over:
            samples = self.samples if self.samples is not None else layer.shape[0]
            self.ops.append(Normalise(layer, reads, wants, makes, owned, samples, over))
        else:
            self.ops.append(Compute(layer, reads, wants, makes))

    def _wants(self, layer: Layer, reads: Sequence[Held]) -> tuple[Layout, ...]:
        """Return for each operand which part of what is held the layer needs."""
        index, result = 0, []
        for operand, held in zip(layer.operands, reads, strict=True):
            if operand.origin is not Source.VALUE:
                result.append(held.layout)
                continue
            boxes = tuple(self._wanted(layer, operand, index))
            result.append(Layout(operand.spec.shape, boxes, tuple(range(self.width))))
            index += 1
        return tuple(result)

    def _read(self, layer: Layer, operand: Operand) -> Held:
        if operand.origin is not Source.VALUE:
            return self._read_parameter(layer, operand)
        need = self.needs[operand.source, self._key(layer)]
        if need.held is None:
            need.held = self._bring(operand, need, self._key(layer))
        return need.held

    def _bring(self, operand: Operand, need: _Need, key: tuple[int, ...]) -> Held:
        """Make a value available in the boxes that its readers want."""
        name = operand.source
        made = self.made.get(name)
        shape = operand.spec.shape
        wanted = Layout(shape, tuple(need.boxes), tuple(range(self.width)))
        count = sum(1 for (n, _), other in self.needs.items() if n == name and other.held is not None)
        slot = f"{name}@{count}" if count or made is not None else name
        if made is None:
            held = Held(name, slot, wanted, operand.spec, self.grads[name])
            self.arrivals[slot] = held
            return held
        held = self._regrid(made, wanted, slot, f"{_word(key)} readers of {name}")
        return held if held is made else self._with_margins(held, need)

    def _with_margins(self, held: Held, need: _Need) -> Held:
        """Let a regrid leave room for the padding that local kernels cannot add on one side alone."""
        margins = _margins(held, need, self.outs)
        if margins is None:
            return held
        regrid = self.ops.pop()
        assert isinstance(regrid, Regrid)
        held = replace(held, margins=margins)
        self.ops.append(replace(regrid, makes=held))
        return held

    def _regrid(self, made: Held, wanted: Layout, slot: str, why: str) -> Held:
        pairs = zip(made.layout.boxes, wanted.boxes, strict=True)
        if not made.layout.partial and all(has.contains(box) for has, box in pairs):
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
        home = self.homes[layer.name]
        shape = operand.spec.shape
        if home.sums:
            boxes = self._summand_boxes(layer, operand, home)
        else:
            outs = self.outs[layer.name]
            boxes = [needed(operand.access, shape, _solid(box, layer.outputs[0].shape)) for box in outs]
        layout = Layout(shape, tuple(boxes), tuple(range(self.width)))
        is_parameter = operand.origin is Source.PARAMETER
        store = self.parameters if is_parameter else self.buffers
        if operand.source in store and store[operand.source] != layout:
            known = store[operand.source]
            layout = Layout(
                shape, tuple(a.hull(b) for a, b in zip(known.boxes, boxes, strict=True)), known.ranks
            )
        store[operand.source] = layout
        trainable = is_parameter and operand.source not in self.graph.frozen
        return Held(operand.source, operand.source, layout, operand.spec, trainable)

    def _summand_boxes(self, layer: Layer, operand: Operand, home: Home) -> list[Box]:
        """Cut a weight along the contraction; a bias is added by the first rank alone."""
        shape = operand.spec.shape
        index = layer.operands.index(operand)
        for group in layer.contracts:
            for position, dim in group:
                if position == index:
                    first = next(d for p, d in group if p == 0)
                    parts = [box.ranges[first] for box in home.reads[0].layout(self.width).boxes]
                    return [Box.whole(shape).replace(dim, part) for part in parts]
        if operand.role != "bias":
            return [Box.whole(shape)] * self.width
        nothing = Box((0,) * len(shape), (0,) * len(shape))
        return [Box.whole(shape)] + [nothing] * (self.width - 1)


def _margins(
    held: Held, need: _Need, outs: Mapping[str, Sequence[Box]]
) -> tuple[tuple[Range, ...], ...] | None:
    """Return the zeros around each rank's box if all readers are convolutions and one side differs."""
    result: list[tuple[Range, ...]] = []
    uneven: set[int] = set()
    for rank, box in enumerate(held.layout.boxes):
        around = [(0, 0)] * box.ndim
        for layer in need.readers:
            if layer.op != "conv" or layer.attributes.get("padding_mode", "zeros") != "zeros":
                return None
            out = outs[layer.name][rank]
            if out.empty:
                continue
            ranges = reach(layer.operands[0].access, held.layout.shape, out)
            for dim, ((lo, hi), n) in enumerate(zip(ranges, held.layout.shape, strict=True)):
                below, above = max(0, -lo), max(0, hi - n)
                uneven |= {dim} if below != above else set()
                around[dim] = (max(around[dim][0], below), max(around[dim][1], above))
        result.append(tuple(around))
    if not uneven:
        return None
    return tuple(
        tuple(pair if dim in uneven else (0, 0) for dim, pair in enumerate(around)) for around in result
    )


def _solid(box: Box, shape: Sequence[int]) -> Box:
    """Let a rank without outputs hold the parameters it would need if it had some.

    Only the empty extents are filled: a share without samples needs the same filters as any other.
    """
    if not box.empty:
        return box
    return Box.of((a, b) if b > a else (0, max(1, n)) for (a, b), n in zip(box.ranges, shape, strict=True))


def _shared_over(layer: Layer, home: Home, replicated: bool) -> str:
    """Tell with whom the statistics of a layer are shared: `group`, `replicas` or nobody (empty)."""
    cut = home.cuts.dims
    if layer.op == "batch_norm" and layer.attributes["batch_statistics"]:
        if any(d != 1 for d in cut):
            return "group"
        return "replicas" if replicated else ""
    if layer.op == "instance_norm" and layer.attributes["instance_statistics"]:
        # Running statistics are a mean over all samples.
        tracked = layer.operand("running_mean") is not None
        return "group" if any(d > 1 for d in cut) or (tracked and (replicated or 0 in cut)) else ""
    if layer.op == "group_norm":
        return "group" if any(d > 0 for d in cut) else ""
    return ""


def _word(key: Iterable[int]) -> str:
    dims = tuple(key)
    if not dims:
        return "whole"
    if dims[0] == -1:
        return "summing"
    return "batch" if dims == (0,) else "channel" if dims == (1,) else "tiled"
