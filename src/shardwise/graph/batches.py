"""Derive the graph for another number of samples from those for others, without following the network.

Between two graphs of a network that differ in the number of samples all numbers grow in proportion to it, or
not at all: sizes, operations, bytes. So what lies between two points, and is confirmed by a third, gives the
graph for any number. It is not done where that is in doubt: where the model decides by sizes, takes parts
that may be all there is, or calculates by steps (`uneven`); where layers fold samples into other dimensions
or are opaque; and for less than two samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from shardwise.geometry.access import Axis
from shardwise.graph.errors import CaptureError, SizeError
from shardwise.graph.layer import Kind, Layer

if TYPE_CHECKING:
    from shardwise.graph.graph import Graph

# A single sample is broadcast, or refused, where several are not.
FEWEST = 2
# So many graphs tell how the others are.
ENOUGH = 3
_Make = Callable[[int], Any]


class _UnlikeError(Exception):
    """Two graphs differ in more than numbers."""


class Batches:
    """Graphs of one network for any number of samples."""

    def __init__(self, graph: Graph, make: Callable[[int], tuple[Layer, ...]]) -> None:
        self.graph, self.make = graph, make

    def at(self, batch: int) -> Graph:
        """Return the graph for a mini-batch of so many samples."""
        made = replace(self.graph, layers=self.make(batch))
        made.__dict__["batches"] = self
        return made


def batches_of(graph: Graph, others: Callable[[int], Graph], known: Sequence[int]) -> Batches | None:
    """Return what makes the graphs for all other numbers of samples, or None where they must be followed.

    Args:
        graph: for any number of samples.
        others: makes the graph for another number by following the network.
        known: numbers for which that was done already.
    """
    if getattr(graph.rebuild, "decides", True) or not all(map(_grows, graph.layers)):
        return None
    if len({shape[:1] for shape in graph.shapes}) != 1:
        return None
    probes = [*known, FEWEST, FEWEST + 1, FEWEST + 2]
    try:
        first, second, third = [others(n) for n in list(dict.fromkeys(probes))[:ENOUGH]]
        make = _between(first.layers, second.layers, first.batch, second.batch)
        # What was captured may have notes of its own, those that follow have not.
        found = Batches(second, make if isinstance(make, _Grown) else lambda _: first.layers)
        return found if found.at(third.batch) == third else None
    except (_UnlikeError, CaptureError, SizeError, RuntimeError, TypeError, ValueError):
        # Values that cannot be compared or put together again: the network is followed, as it always can be.
        return None


def _grows(layer: Layer) -> bool:
    """Tell whether a layer treats every number of samples alike."""
    if layer.kind is not Kind.RESHAPE:
        return layer.kind is not Kind.OTHER
    # A reshape that leaves the samples alone cannot confuse them with another dimension of that size.
    return all(o.access[:1] == (Axis(0),) and o.spec.shape[0] == layer.shape[0] for o in layer.operands)


def _between(a: Any, b: Any, at: int, other: int) -> Any:
    """Return what `a` and `b` have in common, or a function of the number of samples where they differ."""
    if a is b:
        return a
    if type(a) is not type(b):
        raise _UnlikeError
    if isinstance(a, bool | str | float | Enum | type(None)):
        if a != b:
            raise _UnlikeError
        return a
    if isinstance(a, int):
        slope, rest = divmod(b - a, other - at)
        if rest:
            raise _UnlikeError
        base = a - slope * at
        return _Grown(lambda batch: base + slope * batch) if slope else a
    if is_dataclass(a) and not isinstance(a, type):
        names = [f.name for f in fields(a)]
        parts = [_between(getattr(a, n), getattr(b, n), at, other) for n in names]
        return _joined(a, parts, type(a))
    if isinstance(a, Mapping):
        if list(a) != list(b):
            raise _UnlikeError
        keys = list(a)
        parts = [_between(a[k], b[k], at, other) for k in keys]
        return _joined(a, parts, lambda *values: dict(zip(keys, values, strict=True)))
    if type(a) in (tuple, list):
        if len(a) != len(b):
            raise _UnlikeError
        kind = type(a)
        return _joined(a, [_between(x, y, at, other) for x, y in zip(a, b, strict=True)], lambda *v: kind(v))
    if isinstance(a, slice):
        ends = [_between(getattr(a, n), getattr(b, n), at, other) for n in ("start", "stop", "step")]
        return _joined(a, ends, slice)
    if a is not b and not bool(a == b):
        raise _UnlikeError
    return a


class _Grown:
    """A part that depends on the number of samples; kept apart from functions that layers hold."""

    __slots__ = ("make",)

    def __init__(self, make: _Make) -> None:
        self.make = make

    def __call__(self, batch: int) -> Any:
        return self.make(batch)


def _joined(whole: Any, parts: list[Any], build: Callable[..., Any]) -> Any:
    """Put parts together: once and for all if none of them grows."""
    if not any(isinstance(part, _Grown) for part in parts):
        return whole
    grown = [(i, part.make) for i, part in enumerate(parts) if isinstance(part, _Grown)]

    def make(batch: int) -> Any:
        values = parts.copy()
        for i, part in grown:
            values[i] = part(batch)
        return build(*values)

    return _Grown(make)
