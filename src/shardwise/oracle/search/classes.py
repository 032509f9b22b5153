"""Sort the layers of a network into classes that cost the same under a split, without lowering all ranks.

Deep networks repeat the same few blocks; and of the ranks that share a stage, an inner one stands for all.
The homes of values and the boxes that layers need come from the rules that lowering uses; what is left out
here is only which rank sends which piece. What a block does depends only on its layers and on the state of
the values that it reads, so a block that was met in the same state before is not looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwise.geometry import Box
from shardwise.geometry.access import needed
from shardwise.graph import Graph, Kind, Layer, Source
from shardwise.oracle.search.blocks import Block, blocks_of
from shardwise.oracle.search.parts import LayerClass, Value, inner, layer_class
from shardwise.plan import Split
from shardwise.program.assign import Home, entry_cuts, fitted, home_of
from shardwise.program.losses import expand_losses
from shardwise.program.rectified import rectified_layers
from shardwise.program.results import whole_results

Ints = NDArray[np.intp]
# Who has brought a value in which layout, and whether it was kept there.
State = frozenset[tuple[str, int]]
_NEW: State = frozenset()


@dataclass
class Classes:
    """The layers of a network under one split: which class each belongs to, and how many each has."""

    split: Split
    classes: list[LayerClass] = field(default_factory=list)
    of: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    counts: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.intp))


@dataclass
class _Places:
    """Where the values of a network are under one split: the distinct homes and boxes, and each value's."""

    homes: list[Home]
    ids: list[int]
    boxes: list[Box]
    outs: list[int]


class Sorter:
    """Sort the layers of one network for many splits."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.layers: list[Layer] = expand_losses(whole_results(graph.layers))
        # Rectifications that norms do themselves where they share statistics, and these norms.
        self.done = rectified_layers(graph)
        self.rectify = {graph[name].operands[0].source for name in self.done}
        numbers: dict[tuple[object, ...], int] = {}
        self.kinds = [
            numbers.setdefault(
                (*_signature(layer), layer.name in self.done, layer.name in self.rectify), len(numbers)
            )
            for layer in self.layers
        ]
        places = {layer.name: i for i, layer in enumerate(self.layers)}
        self.sources = [
            [places[o.source] for o in layer.operands if o.origin is Source.VALUE] for layer in self.layers
        ]
        self.saves = [
            (
                *[self.layers[s].name in layer.saves for s in found],
                layer.name in layer.saves and layer.name not in self.done,
            )
            for layer, found in zip(self.layers, self.sources, strict=True)
        ]
        self.grads = self._grads()
        self.positions = self._positions()
        self.blocks = blocks_of(self._codes())
        self.outside, self.exports = self._borders()
        self._sorted: dict[tuple[Split, str, str], Classes] = {}
        # Values have the same homes under both halos, which are asked for one after the other.
        self._placed = lru_cache(maxsize=2)(self._homes)

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

    def _codes(self) -> list[int]:
        """Number the layers by all that matters of them: what they are, and how far back they read."""
        numbers: dict[tuple[object, ...], int] = {}
        codes = []
        for i, (layer, sources) in enumerate(zip(self.layers, self.sources, strict=True)):
            read = tuple((i - s, self.grads[s], self.layers[s].kind is Kind.INPUT) for s in sources)
            frozen = tuple(p in self.graph.frozen for p in layer.parameters)
            code = (self.kinds[i], read, self.grads[i], self.saves[i], frozen)
            codes.append(numbers.setdefault(code, len(numbers)))
        return codes

    def _borders(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Return what each kind of block reads from outside, and what others read of it, as distances."""
        outside: dict[int, list[int]] = {}
        exports: dict[int, set[int]] = {block.number: set() for block in self.blocks}
        home = [block for block in self.blocks for _ in range(block.start, block.stop)]
        for block in self.blocks:
            read = sorted(
                {s for i in range(block.start, block.stop) for s in self.sources[i] if s < block.start}
            )
            outside[block.number] = [s - block.start for s in read]
            for s in read:
                exports[home[s].number].add(s - home[s].start)
        return outside, {number: sorted(found) for number, found in exports.items()}

    def sort(self, split: Split, halo: str, tail: str = "auto") -> Classes:
        """Return the classes under a split, the same ones when they are asked for again."""
        key = (split, halo, tail)
        if key not in self._sorted:
            split = fitted(self.graph, split)
            places = self._outs(*self._placed(split, tail), halo)
            self._sorted[key] = _Sorting(self, split, places).classes()
        return self._sorted[key]

    def _homes(self, split: Split, tail: str) -> tuple[list[Home], list[int]]:
        """Return the distinct homes, and which one every value has; equal blocks are asked for once."""
        known: dict[tuple[int, ...], list[int]] = {}
        numbers: dict[Home, int] = {}
        homes: list[Home] = []
        ids: list[int] = []
        for block in self.blocks:
            key = (block.number, *[ids[block.start + d] for d in self.outside[block.number]])
            found = known.get(key)
            if found is not None:
                ids += found
                continue
            for i in range(block.start, block.stop):
                layer = self.layers[i]
                if layer.kind is Kind.INPUT:
                    home = Home(entry_cuts(layer.shape, split))
                else:
                    around = {self.layers[s].name: homes[ids[s]] for s in self.sources[i]}
                    home = home_of(layer, around, split, tail)
                if home not in numbers:
                    numbers[home] = len(homes)
                    homes.append(home)
                ids.append(numbers[home])
            known[key] = ids[block.start :]
        return homes, ids

    def _outs(self, homes: list[Home], ids: list[int], halo: str) -> _Places:
        """Find which box of every value an inner rank makes: its part of the home, or more if fused."""
        places = _Places(homes, ids, [inner(home) for home in homes], list(ids))
        if halo != "layer":
            _Widening(self, places).run()
        return places


class _Widening:
    """Let inner ranks make more than their own part where that saves an exchange, from the last layer on."""

    def __init__(self, sorter: Sorter, places: _Places) -> None:
        self.sorter, self.places = sorter, places
        self.boxes, self.ids, self.outs = places.boxes, places.ids, places.outs
        self.numbers: dict[Box, int] = {}
        for number, box in enumerate(self.boxes):
            self.numbers.setdefault(box, number)
        self.dims = [home.cuts.dims for home in places.homes]
        self.wanted: dict[int, int] = {}
        self.hulls: dict[tuple[int, int], int] = {}

    def run(self) -> None:
        """Go through all blocks backwards."""
        sorter, ids, wanted = self.sorter, self.ids, self.wanted
        known: dict[tuple[object, ...], tuple[list[int], list[tuple[int, int]]]] = {}
        for block in reversed(sorter.blocks):
            start, stop, outside = block.start, block.stop, sorter.outside[block.number]
            key = (
                block.number,
                *ids[start:stop],
                *[ids[start + d] for d in outside],
                *[wanted.get(start + d, -1) for d in sorter.exports[block.number]],
            )
            found = known.get(key)
            if found is None:
                known[key] = found = self._block(block)
            self.outs[start:stop] = found[0]
            for distance, number in found[1]:
                self._want(start + distance, number)

    def _block(self, block: Block) -> tuple[list[int], list[tuple[int, int]]]:
        sorter, ids, outs = self.sorter, self.ids, self.outs
        asked: list[tuple[int, int]] = []
        for i in range(block.stop - 1, block.start - 1, -1):
            layer, home = sorter.layers[i], self.places.homes[ids[i]]
            if home.sums or not self.dims[ids[i]]:
                continue
            widens = layer.kind is not Kind.INPUT and layer.op not in ("group_norm", "instance_norm")
            if i in self.wanted and widens:
                own = self.boxes[ids[i]]
                wide = own.hull(self.boxes[self.wanted[i]])
                if 4 * wide.size <= 5 * own.size:
                    outs[i] = self._number(wide)
            values = [o for o in layer.operands if o.origin is Source.VALUE]
            for s, operand in zip(sorter.sources[i], values, strict=True):
                if self.dims[ids[s]] == self.dims[ids[i]]:
                    number = self._number(needed(operand.access, operand.spec.shape, self.boxes[outs[i]]))
                    if s < block.start:
                        asked.append((s - block.start, number))
                    else:
                        self._want(s, number)
        return outs[block.start : block.stop], asked

    def _want(self, i: int, number: int) -> None:
        pair = (self.wanted.get(i, number), number)
        if pair not in self.hulls:
            self.hulls[pair] = self._number(self.boxes[pair[0]].hull(self.boxes[pair[1]]))
        self.wanted[i] = self.hulls[pair]

    def _number(self, box: Box) -> int:
        if box not in self.numbers:
            self.numbers[box] = len(self.boxes)
            self.boxes.append(box)
        return self.numbers[box]


class _Sorting:
    """Give every layer its class, block by block."""

    def __init__(self, sorter: Sorter, split: Split, places: _Places) -> None:
        self.sorter, self.split, self.places = sorter, split, places
        self.ids, self.outs = places.ids, places.outs
        layouts: dict[object, int] = {}
        self.dims = [layouts.setdefault((h.cuts.dims, h.sums), len(layouts)) for h in places.homes]
        self.states: dict[int, State] = {}
        self.known: dict[tuple[object, ...], int] = {}
        self.result = Classes(split)

    def classes(self) -> Classes:
        """Return the classes of all layers."""
        of: list[int] = []
        sorter, ids, outs, states = self.sorter, self.ids, self.outs, self.states
        met: dict[tuple[object, ...], tuple[list[int], list[tuple[int, State]]]] = {}
        for block in sorter.blocks:
            start, stop = block.start, block.stop
            key: tuple[object, ...] = (block.number, *ids[start:stop], *outs[start:stop])
            for distance in sorter.outside[block.number]:
                s = start + distance
                key += (ids[s], outs[s], states.get(s, _NEW))
            found = met.get(key)
            if found is None:
                numbers = [self._layer(i) for i in range(start, stop)]
                touched = [*sorter.outside[block.number], *sorter.exports[block.number]]
                found = met[key] = (numbers, [(d, states.get(start + d, _NEW)) for d in touched])
            else:
                for distance, state in found[1]:
                    states[start + distance] = state
            of += found[0]
        result = self.result
        result.of = np.array(of, dtype=np.intp)
        result.counts = np.bincount(result.of, minlength=len(result.classes))
        return result

    def _layer(self, i: int) -> int:
        sorter, ids, outs = self.sorter, self.ids, self.outs
        here, sources, saves = self.dims[ids[i]], sorter.sources[i], sorter.saves[i]
        brought = [self._first(s, "brought", here) for s in sources]
        kept = [
            named and self._first(s, "kept", here != self.dims[ids[s]])
            for s, named in zip(sources, saves, strict=False)
        ]
        own = saves[-1] and self._first(i, "kept", False)
        reads = tuple((ids[s], outs[s], sorter.grads[s]) for s in sources)
        flags = (*brought, *kept, own, sorter.grads[i])
        key = (sorter.kinds[i], ids[i], outs[i], reads, flags)
        number = self.known.get(key)
        if number is None:
            number = self.known[key] = len(self.result.classes)
            self.result.classes.append(self._class(i, brought, kept, own))
        return number

    def _first(self, i: int, what: str, where: int) -> bool:
        """Note something about a value; tell whether it is new."""
        state = self.states.get(i, _NEW)
        if (what, where) in state:
            return False
        self.states[i] = state | {(what, where)}
        return True

    def _class(self, i: int, brought: Sequence[bool], kept: Sequence[bool], own: bool) -> LayerClass:
        sorter, places = self.sorter, self.places
        homes, boxes = places.homes, places.boxes
        values = [
            Value(sorter.layers[s], homes[self.ids[s]], boxes[self.outs[s]], new, keep, sorter.grads[s])
            for s, new, keep in zip(sorter.sources[i], brought, kept, strict=True)
        ]
        layer = sorter.layers[i]
        return layer_class(
            sorter.kinds[i],
            layer,
            homes[self.ids[i]],
            boxes[self.outs[i]],
            values,
            keeps_own=own,
            grad=sorter.grads[i],
            width=self.split.width,
            frozen=sorter.graph.frozen,
            done=layer.name in sorter.done,
            rectifies=layer.name in sorter.rectify,
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


__all__ = ["Classes", "LayerClass", "Sorter"]
