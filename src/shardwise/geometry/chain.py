"""Which box of every value each rank owns, makes and reads; fusion is the choice of where to exchange.

Walk the layers forward and every rank's owned box of the input becomes its owned box of every value. Walk
them backward and what a rank must hold of a value is the hull of what it owns and of what its own next
layers read; at a value where ranks exchange, each makes only what it owns and receives the rest:

    owned      [. . . .|. . . .|. . . .]     three ranks, two 3x3 layers, exchange at the input only
    conv2 out          [. . . .]             the middle rank makes what it owns,
    conv1 out        [. . . . . .]           one pixel more on either side (made twice over),
    input          [. . . . . . . .]         and reads two more, received in one exchange

Every range is clipped to the image at every layer, so nothing is computed from padding of padding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.geometry.access import Access, needed
from shardwise.geometry.box import Box, Range
from shardwise.geometry.layout import Layout

Boxes = tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the network, the values it is made from, and how each of them is read."""

    name: str
    shape: tuple[int, ...]
    inputs: tuple[str, ...] = ()
    accesses: tuple[Access, ...] = ()

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.accesses):
            raise ValueError(
                f"node {self.name!r} has {len(self.inputs)} inputs and {len(self.accesses)} accesses; "
                "give one access for each input"
            )


@dataclass(frozen=True, slots=True)
class Held:
    """Say what each rank makes and reads of every value.

    Args:
        made: what its layer computes on each rank; more than owned where the readers need it.
        wanted: what the readers on each rank read, as one hull; what is owned where nobody reads.
        exchanges: the values that travel from `made` to `wanted` before they are read.
    """

    made: Mapping[str, Layout]
    wanted: Mapping[str, Layout]
    exchanges: frozenset[str]

    def at_hand(self, name: str) -> Layout:
        """Return what the readers of a value find on each rank."""
        return self.wanted[name] if name in self.exchanges else self.made[name]


def owned(nodes: Iterable[Node], given: Mapping[str, Layout]) -> dict[str, Layout]:
    """Carry ownership from the given values forward through every layer.

    A layer follows the operand that fixes most of its dimensions, a divided one before a whole one; along
    dimensions that this operand does not fix every rank owns everything.

    Args:
        nodes: in an order in which they can be computed.
        given: layouts of the values without inputs, and of any other that is to differ.
    """
    result: dict[str, Layout] = {}
    memo: dict[tuple[Access, tuple[int, ...], Layout], Layout] = {}
    for node in nodes:
        if node.name in given:
            result[node.name] = given[node.name]
            continue
        if not node.inputs:
            raise ValueError(f"owned: the value {node.name!r} has no inputs; give its layout")
        operands = [(a, result[s]) for s, a in zip(node.inputs, node.accesses, strict=True)]
        access, layout = max(operands, key=_leads)
        key = (access, node.shape, layout)
        if key not in memo:
            memo[key] = _carried(node, access, layout)
        result[node.name] = memo[key]
    return result


def _leads(operand: tuple[Access, Layout]) -> tuple[int, bool]:
    access, layout = operand
    return (len({axis.out for axis in access if axis.out is not None}), not layout.is_whole)


def _carried(node: Node, access: Access, layout: Layout) -> Layout:
    spans: list[list[Range]] = [[(0, n)] * len(layout.boxes) for n in node.shape]
    for dim, (axis, n) in enumerate(zip(access, layout.shape, strict=True)):
        if axis.out is None:
            continue
        ends = {end for box in layout.boxes for end in (box.lo[dim], box.hi[dim])}
        bounds = sorted(ends | {0, n})
        cuts = axis.map.own(bounds, n)
        if cuts[-1] != node.shape[axis.out]:
            raise ValueError(
                f"node {node.name!r}: {axis.map} makes {cuts[-1]} of {n} along dimension {axis.out}, "
                f"its shape {node.shape} says {node.shape[axis.out]}"
            )
        moved = dict(zip(bounds, cuts, strict=True))
        spans[axis.out] = [(moved[box.lo[dim]], moved[box.hi[dim]]) for box in layout.boxes]
    return Layout(node.shape, tuple(Box.of(cell) for cell in zip(*spans, strict=True)), layout.ranks)


def held(nodes: Sequence[Node], owned: Mapping[str, Layout], exchanges: Collection[str]) -> Held:
    """Return what every rank makes and reads of every value when exchanges happen at `exchanges`.

    Args:
        nodes: in an order in which they can be computed.
        owned: the owned layout of every value, all over the same ranks.
        exchanges: names of the values at which halos travel; at all others the readers' ranges are made
            by the reading rank itself.
    """
    shapes = {node.name: node.shape for node in nodes}
    walk = _Walk()
    made: dict[str, Layout] = {}
    wanted: dict[str, Layout] = {}
    wants: dict[str, Boxes] = {}
    for node in reversed(nodes):
        own = owned[node.name]
        if own.ranks != owned[nodes[0].name].ranks:
            raise ValueError(f"held: {node.name!r} lives on ranks {own.ranks}, others do not; cut there")
        want = wants.pop(node.name, own.boxes)
        boxes = own.boxes if node.name in exchanges else walk.hulls(own.boxes, want)
        made[node.name] = walk.layout(node.shape, boxes, own.ranks)
        wanted[node.name] = walk.layout(node.shape, want, own.ranks)
        for source, access in zip(node.inputs, node.accesses, strict=True):
            need = walk.needs(access, shapes[source], boxes)
            wants[source] = walk.hulls(wants[source], need) if source in wants else need
    return Held(made, wanted, frozenset(exchanges))


class _Walk:
    """Remember results during one walk: deep networks ask the same few questions thousands of times."""

    def __init__(self) -> None:
        self._needs: dict[tuple[Access, tuple[int, ...], Boxes], Boxes] = {}
        self._hulls: dict[tuple[Boxes, Boxes], Boxes] = {}
        self._layouts: dict[tuple[tuple[int, ...], Boxes], Layout] = {}

    def needs(self, access: Access, shape: tuple[int, ...], boxes: Boxes) -> Boxes:
        key = (access, shape, boxes)
        if key not in self._needs:
            self._needs[key] = tuple(needed(access, shape, box) for box in boxes)
        return self._needs[key]

    def hulls(self, first: Boxes, second: Boxes) -> Boxes:
        if first is second:
            return first
        key = (first, second)
        if key not in self._hulls:
            self._hulls[key] = tuple(map(Box.hull, first, second))
        return self._hulls[key]

    def layout(self, shape: tuple[int, ...], boxes: Boxes, ranks: tuple[int, ...]) -> Layout:
        key = (shape, boxes)
        if key not in self._layouts:
            self._layouts[key] = Layout(shape, boxes, ranks)
        return self._layouts[key]
