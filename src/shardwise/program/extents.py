"""Which box of every value each rank makes, and which boxes its readers want.

Every value has a home, the boxes that the ranks own. What the readers need beyond that, the halo, either
travels (an exchange) or is made twice over by the rank that reads it (fusion: several layers share one
exchange). Walking the layers backwards decides it for each value, over the boxes of all ranks:

    made = home                      where an exchange happens, or nobody needs more
    made = hull(home, needed)        where the chain goes on

The chain behind a value goes on to the layer that makes it

    halo=layer    never
    halo=3        while fewer than three layers with a reach of their own lie in the chain
    halo=fused    while no rank makes more than a quarter more than it owns
    halo=auto     as fused, where that saves an exchange: further back there is another layer with a reach, or
                  the stage's input, before any statistics that ranks share (those wait for one another
                  anyway)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.geometry import Box
from shardwise.graph import Kind, Layer, Operand, Source
from shardwise.program.assign import Home
from shardwise.program.needs import Needs
from shardwise.program.norms import has_statistics, shared_over

Key = tuple[int, ...]


@dataclass
class Need:
    """What the readers of one kind want of a value: the hull of their boxes."""

    boxes: tuple[Box, ...]
    readers: list[Layer]


@dataclass
class Extents:
    """The outcome: what is made of every value, and what is wanted of it by each kind of reader.

    `wants` has what each reader itself wants of its value operands, by its name and their number.
    """

    outs: dict[str, tuple[Box, ...]]
    needs: dict[tuple[str, Key], Need]
    wants: dict[tuple[str, int], tuple[Box, ...]]
    known: Needs = field(default_factory=Needs)


def key_of(layer: Layer, homes: Mapping[str, Home]) -> Key:
    """Name the way in which a layer reads its operands; readers with one key share one exchange."""
    home = homes[layer.name]
    return (-1, *home.reads[0].dims) if home.sums else home.cuts.dims


def wanted_boxes(
    operand: Operand, index: int, home: Home, outs: tuple[Box, ...], known: Needs
) -> tuple[Box, ...]:
    """Return what each rank needs of a layer's value operand, the `index`-th, to make the boxes `outs`."""
    if home.sums:
        return home.reads[index].layout(len(outs)).boxes
    return known.of(operand.access, operand.spec.shape, outs)


def find_extents(
    layers: Sequence[Layer],
    homes: Mapping[str, Home],
    width: int,
    halo: str,
    *,
    sync: bool = True,
    replicated: bool = False,
) -> Extents:
    """Decide for every value how much of it each rank makes.

    Args:
        layers: of the stage, in order.
        homes: where the values live.
        width: the number of ranks.
        halo: how many layers share one exchange.
        sync: whether batch norm shares its statistics.
        replicated: whether there are other data replicas.
    """
    walk = _Walk(layers, homes, width, halo, sync, replicated)
    for layer in reversed([layer for layer in layers if layer.kind is not Kind.INPUT]):
        walk.found.outs[layer.name] = walk.extent(layer)
        walk.collect(layer)
    return walk.found


class _Walk:
    def __init__(
        self,
        layers: Sequence[Layer],
        homes: Mapping[str, Home],
        width: int,
        halo: str,
        sync: bool,
        replicated: bool,
    ) -> None:
        self.homes, self.width, self.halo = homes, width, halo
        self.sync, self.replicated = sync, replicated
        self.makers = {layer.name: layer for layer in layers if layer.kind is not Kind.INPUT}
        self.depths: dict[str, int] = {}
        self.found = Extents({}, {}, {})
        self.saves: dict[str, bool] = {}
        for layer in self.makers.values():
            self.saves[layer.name] = halo == "auto" and self._saves(layer)

    def extent(self, layer: Layer) -> tuple[Box, ...]:
        """Return which box of its output each rank makes: its home, or more where the halo is made twice."""
        home = self.homes[layer.name]
        boxes = home.cuts.layout(self.width).boxes
        need = self.found.needs.get((layer.name, home.cuts.dims))
        if need is None or home.sums or _contain(boxes, need.boxes):
            return boxes
        wider = tuple(map(Box.hull, boxes, need.boxes))
        if self._may_widen(layer, home) and self._pays(layer, boxes, wider):
            return wider
        self.depths[layer.name] = 0
        return boxes

    def collect(self, layer: Layer) -> None:
        """Note what the layer needs of each value that it reads."""
        home, outs = self.homes[layer.name], self.found.outs[layer.name]
        for i, operand in enumerate(o for o in layer.operands if o.origin is Source.VALUE):
            boxes = wanted_boxes(operand, i, home, outs, self.found.known)
            self.found.wants[layer.name, i] = boxes
            name, key = operand.source, (operand.source, key_of(layer, self.homes))
            need = self.found.needs.get(key)
            if need is None:
                self.found.needs[key] = Need(boxes, [layer])
            else:
                if need.boxes != boxes:
                    need.boxes = tuple(map(Box.hull, need.boxes, boxes))
                need.readers.append(layer)
            if not self.halo.isdecimal():
                continue
            depth = self.depths.get(layer.name, 0) + int(self._reaches_over(layer, operand))
            self.depths[name] = max(self.depths.get(name, 0), depth)

    def _may_widen(self, layer: Layer, home: Home) -> bool:
        """Tell whether a layer can make pixels that other ranks own: not if its statistics are its own."""
        own_statistics = has_statistics(layer) and not self._shares(layer, home)
        return len(layer.outputs) == 1 and not own_statistics

    def _shares(self, layer: Layer, home: Home) -> bool:
        return self.sync and shared_over(layer, home, self.replicated) == "group"

    def _pays(self, layer: Layer, boxes: Sequence[Box], wider: Sequence[Box]) -> bool:
        """Tell whether the chain goes on to the producer of a value, or an exchange happens here."""
        if self.halo == "layer":
            return False
        if self.halo.isdecimal():
            return self.depths[layer.name] < int(self.halo)
        if self.halo == "auto" and not self.saves[layer.name]:
            return False
        return all(4 * wide.size <= 5 * own.size for own, wide in zip(boxes, wider, strict=True))

    def _saves(self, layer: Layer) -> bool:
        """Tell whether an exchange is saved if a chain goes on to this layer."""
        if self._shares(layer, self.homes[layer.name]):
            return False
        values = [o for o in layer.operands if o.origin is Source.VALUE]
        return any(self._reaches_over(layer, o) for o in values) or all(
            self.saves.get(o.source, True) for o in values
        )

    def _reaches_over(self, layer: Layer, operand: Operand) -> bool:
        """Tell whether what a rank owns of the output needs more of the operand than it owns of that."""
        outs = self.homes[layer.name].cuts.layout(self.width).boxes
        held = self.homes[operand.source].cuts.layout(self.width).boxes
        return not _contain(held, self.found.known.of(operand.access, operand.spec.shape, outs))


def _contain(boxes: Sequence[Box], others: Sequence[Box]) -> bool:
    """Tell whether every rank's box holds its other one."""
    return boxes == others or all(map(Box.contains, boxes, others))
