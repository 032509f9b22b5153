"""Sort the layers of a network into classes that cost the same under a split, without lowering all ranks.

Deep networks repeat the same few layers; and of the ranks that share a stage, an inner one stands for all.
The homes of values and the boxes that layers need come from the rules that lowering uses; what is left out
here is only which rank sends which piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwise.geometry import Box
from shardwise.geometry.access import needed
from shardwise.graph import Graph, Kind, Layer, Operand, Source
from shardwise.oracle.kernels import Task
from shardwise.plan import Split
from shardwise.program.assign import Home, entry_cuts, fitted, home_of
from shardwise.program.losses import expand_losses
from shardwise.program.results import whole_results

Ints = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Move:
    """What an inner rank receives before a layer: bytes for the whole mini-batch, from so many peers."""

    nbytes: float
    peers: int
    reduces: bool = False


@dataclass
class LayerClass:
    """One representative of layers that cost the same: a rank's task and its communication.

    Layers of one `kind` compute the same when whole. `saved` are bytes kept for backward and `made` bytes of
    the output, for the whole mini-batch; `weights` and `trained` do not depend on the samples. `channels`
    are those of shared statistics.
    """

    kind: int
    task: Task
    moves: tuple[Move, ...]
    channels: int
    saved: float
    made: float
    weights: float
    trained: float
    grad: bool
    input_grad: bool


@dataclass
class Classes:
    """The layers of a network under one split: which class each belongs to, and how many each has."""

    split: Split
    classes: list[LayerClass] = field(default_factory=list)
    of: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    counts: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.intp))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the operands of a layer are: their homes, and what an inner rank has of them."""

    homes: list[Home]
    boxes: list[Box]


class Sorter:
    """Sort the layers of one network for many splits."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.layers: list[Layer] = expand_losses(whole_results(graph.layers))
        numbers: dict[tuple[object, ...], int] = {}
        self.kinds = [numbers.setdefault(_signature(layer), len(numbers)) for layer in self.layers]
        positions = {layer.name: i for i, layer in enumerate(self.layers)}
        self.sources = [
            [positions[o.source] for o in layer.operands if o.origin is Source.VALUE] for layer in self.layers
        ]
        self.saves = [
            (*[self.layers[s].name in layer.saves for s in found], layer.name in layer.saves)
            for layer, found in zip(self.layers, self.sources, strict=True)
        ]
        self.widens = [
            layer.kind is not Kind.INPUT and layer.op not in ("group_norm", "instance_norm")
            for layer in self.layers
        ]
        self.grads = self._grads()
        self.positions = self._positions()

    def _grads(self) -> list[bool]:
        grads: list[bool] = []
        for layer, sources in zip(self.layers, self.sources, strict=True):
            trained = any(p not in self.graph.frozen for p in layer.parameters)
            grads.append(layer.outputs[0].is_float and (trained or any(grads[s] for s in sources)))
        return grads

    def _positions(self) -> Ints:
        """Return for each of these layers its place in the graph; the terms of a loss belong to the loss."""
        index = self.graph.index
        names = [
            layer.name if layer.name in index else layer.name.rpartition(".")[0] for layer in self.layers
        ]
        return np.array([index[name] for name in names], dtype=np.intp)

    def sort(self, split: Split, halo: str) -> Classes:
        """Return the classes under a split."""
        split = fitted(self.graph, split)
        homes, ids = self._homes(split)
        dims = [hash((home.cuts.dims, home.sums)) for home in homes]
        boxes, outs = self._outs(homes, ids, halo)
        result, known = Classes(split), dict[tuple[object, ...], int]()
        of, brought, kept = [], set[tuple[int, int]](), set[tuple[int, bool]]()
        for i, sources in enumerate(self.sources):
            here, saves = dims[ids[i]], self.saves[i]
            flags = []
            for s, named in zip(sources, saves, strict=False):
                reader = (s, here)
                flags.append(reader not in brought)
                brought.add(reader)
                value = (s, here != dims[ids[s]])
                flags.append(named and value not in kept)
                if flags[-1]:
                    kept.add(value)
            own = saves[-1] and (i, False) not in kept
            if own:
                kept.add((i, False))
            key = (self.kinds[i], outs[i], ids[i], self.grads[i], own, *flags)
            for s in sources:
                key += (ids[s], outs[s])
            number = known.get(key)
            if number is None:
                number = known[key] = len(result.classes)
                placed = _Place([homes[ids[s]] for s in sources], [boxes[outs[s]] for s in sources])
                made = self._class(i, homes[ids[i]], boxes[outs[i]], placed, flags, own, split.width)
                result.classes.append(made)
            of.append(number)
        result.of = np.array(of, dtype=np.intp)
        result.counts = np.bincount(result.of, minlength=len(result.classes))
        return result

    def _homes(self, split: Split) -> tuple[list[Home], list[int]]:
        """Return the distinct homes, and which one every value has; equal layers are asked for once."""
        known: dict[tuple[int, ...], int] = {}
        numbers: dict[Home, int] = {}
        homes: list[Home] = []
        ids: list[int] = []
        for i, sources in enumerate(self.sources):
            key = (self.kinds[i], *[ids[s] for s in sources])
            number = known.get(key)
            if number is None:
                layer = self.layers[i]
                if layer.kind is Kind.INPUT:
                    home = Home(entry_cuts(layer.shape, split))
                else:
                    around = {self.layers[s].name: homes[ids[s]] for s in sources}
                    home = home_of(layer, around, split, "replicate")
                if home not in numbers:
                    numbers[home] = len(homes)
                    homes.append(home)
                number = known[key] = numbers[home]
            ids.append(number)
        return homes, ids

    def _outs(self, homes: Sequence[Home], ids: Sequence[int], halo: str) -> tuple[list[Box], list[int]]:
        """Return the distinct boxes, and which one of every value an inner rank makes.

        That is its part of the home, or more where chains are fused.
        """
        boxes = [_inner(home) for home in homes]
        outs = list(ids)
        if halo == "layer":
            return boxes, outs
        numbers: dict[Box, int] = {}
        for number, box in enumerate(boxes):
            numbers.setdefault(box, number)
        wanted: dict[int, int] = {}
        wider: dict[tuple[int, int], int] = {}
        needs: dict[tuple[int, int], list[int]] = {}
        hulls: dict[tuple[int, int], int] = {}
        dims = [home.cuts.dims for home in homes]

        def number_of(box: Box) -> int:
            if box not in numbers:
                numbers[box] = len(boxes)
                boxes.append(box)
            return numbers[box]

        for i in range(len(self.layers) - 1, -1, -1):
            home = homes[ids[i]]
            if home.sums or not dims[ids[i]]:
                continue
            if i in wanted and self.widens[i]:
                state = (ids[i], wanted[i])
                if state not in wider:
                    wide = boxes[ids[i]].hull(boxes[wanted[i]])
                    pays = 4 * wide.size <= 5 * boxes[ids[i]].size
                    wider[state] = number_of(wide) if pays else ids[i]
                outs[i] = wider[state]
            place = (self.kinds[i], outs[i])
            if place not in needs:
                values = [o for o in self.layers[i].operands if o.origin is Source.VALUE]
                needs[place] = [number_of(needed(o.access, o.spec.shape, boxes[outs[i]])) for o in values]
            for s, number in zip(self.sources[i], needs[place], strict=True):
                if dims[ids[s]] == dims[ids[i]]:
                    pair = (wanted.get(s, number), number)
                    if pair not in hulls:
                        hulls[pair] = number_of(boxes[pair[0]].hull(boxes[pair[1]]))
                    wanted[s] = hulls[pair]
        return boxes, outs

    def _class(
        self,
        i: int,
        home: Home,
        made_box: Box,
        placed: _Place,
        flags: Sequence[bool],
        own: bool,
        width: int,
    ) -> LayerClass:
        layer, sources = self.layers[i], self.sources[i]
        shape, itemsize = layer.outputs[0].shape, layer.outputs[0].itemsize
        out = Box.whole(shape) if home.sums else made_box
        held, moves, saved, named = [], [], 0.0, 0
        weights = trained = 0.0
        position = 0
        for operand in layer.operands:
            size = operand.spec.itemsize
            if operand.origin is not Source.VALUE:
                box = _parameter(layer, operand, home, out)
                held.append(box)
                weights += box.size * size
                if operand.origin is Source.PARAMETER and operand.source not in self.graph.frozen:
                    trained += box.size * size
                continue
            source, has = self.layers[sources[position]], placed.boxes[position]
            wants = (
                _inner_of(home.reads[position].bounds)
                if home.sums
                else needed(operand.access, operand.spec.shape, out)
            )
            if flags[2 * position] and source.kind is not Kind.INPUT:
                moves += _moves(placed.homes[position], has, wants, size)
            if flags[2 * position + 1]:
                saved += wants.hull(has).size * size if has.meets(wants) else wants.size * size
            named += operand.spec.nbytes if source.name in layer.saves else 0
            held.append(wants)
            position += 1
        made = float(out.size * itemsize)
        if own:
            saved += made
        named += layer.outputs[0].nbytes if layer.name in layer.saves else 0
        fraction = out.size / max(1, layer.outputs[0].numel)
        saved += max(0, layer.saved_bytes - named) * fraction
        if home.sums:
            whole = layer.outputs[0].nbytes
            # Summands of a value that stays cut travel piece by piece, those of a whole one as one sum.
            cut = bool(home.cuts.dims)
            moves.append(Move(whole * (width - 1) / width if cut else whole, width - 1, not cut))
        norm = layer.op == "batch_norm" and layer.attributes.get("batch_statistics", False)
        boxes = tuple(held)
        return LayerClass(
            self.kinds[i],
            Task(layer, boxes, boxes, out, norm and any(d != 1 for d in home.cuts.dims)),
            tuple(moves),
            out.shape[1] if norm else 0,
            saved if self.grads[i] else 0.0,
            0.0 if layer.alias or layer.kind is Kind.INPUT else made,
            weights,
            trained,
            self.grads[i],
            any(self.grads[s] for s in sources),
        )


def _signature(layer: Layer) -> tuple[object, ...]:
    operands = tuple((o.role, o.origin, o.spec, o.access) for o in layer.operands)
    named = tuple(o.source in layer.saves for o in layer.operands)
    settings = repr(sorted(layer.attributes.items(), key=lambda item: item[0]))
    return (
        layer.op,
        layer.kind,
        operands,
        named,
        layer.outputs,
        settings,
        layer.saved_bytes,
        bool(layer.alias),
    )


def _inner(home: Home) -> Box:
    return _inner_of(home.cuts.bounds)


def _inner_of(bounds: Sequence[Sequence[int]]) -> Box:
    """Return the part of an inner rank: the second one along every dimension that is cut in three or more."""
    cells = []
    for cut in bounds:
        part = 1 if len(cut) > 3 else 0
        cells.append((cut[part], cut[part + 1]))
    return Box.of(cells)


def _parameter(layer: Layer, operand: Operand, home: Home, out: Box) -> Box:
    spec, access = operand.spec, operand.access
    if home.sums:
        index = layer.operands.index(operand)
        for group in layer.contracts:
            for position, dim in group:
                if position == index:
                    first = next(d for p, d in group if p == 0)
                    cell = _inner_of(home.reads[0].bounds).ranges[first]
                    return Box.whole(spec.shape).replace(dim, cell)
        return Box.whole(spec.shape)
    return needed(access, spec.shape, out)


def _moves(home: Home, has: Box, wants: Box, itemsize: int) -> list[Move]:
    """Return what has to arrive so that a rank that holds `has` gets `wants`."""
    if home.sums:
        return []
    missing = (wants.size - has.intersect(wants).size) * itemsize
    if missing <= 0:
        return []
    peers = 1
    for dim, (lo, hi) in enumerate(wants.ranges):
        bounds = home.cuts.bounds[dim]
        peers *= sum(1 for x, y in itertools.pairwise(bounds) if x < hi and y > lo and y > x) or 1
    return [Move(float(missing), max(1, peers - 1))]


__all__ = ["Classes", "LayerClass", "Move", "Sorter"]
