"""Which box of an operand a layer reads to make a box of its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.geometry.axes import AxisMap, Same
from shardwise.geometry.box import Box, Range
from shardwise.geometry.padding import filling

SAME = Same()


@dataclass(frozen=True, slots=True)
class Axis:
    """Tie one dimension of an operand to a dimension of the output.

    `out=None` means that the dimension is read whole whatever the output box is: the channels of a
    convolution, the pixels of a global pooling, the features of a linear layer.
    """

    out: int | None
    map: AxisMap = SAME


Access = tuple[Axis, ...]
"""How a layer reads one operand: one `Axis` per dimension of the operand."""

WHOLE = Axis(None)


def same(ndim: int) -> Access:
    """Return the access of an elementwise layer on operands of the output's shape."""
    return tuple(Axis(d) for d in range(ndim))


def opaque(ndim: int) -> Access:
    """Return the access of a layer of which nothing is known: it reads everything."""
    return (WHOLE,) * ndim


def reach(access: Access, shape: Sequence[int], out: Box) -> tuple[Range, ...]:
    """Return the range of the operand that `out` reads per dimension, image padding included."""
    return tuple(
        (0, n) if axis.out is None else axis.map.need(out.lo[axis.out], out.hi[axis.out], n)
        for axis, n in zip(access, shape, strict=True)
    )


def needed(access: Access, shape: Sequence[int], out: Box) -> Box:
    """Return the box of the operand that the output box `out` reads, clipped to the operand.

    Where padding is read from the image (reflect, replicate, circular) this is the hull of what is read;
    `pieces` has the exact union.
    """
    return Box.of(
        (0, n) if axis.out is None else span(axis.map, out.lo[axis.out], out.hi[axis.out], n)
        for axis, n in zip(access, shape, strict=True)
    )


def needed_by_all(access: Access, shape: Sequence[int], outs: Sequence[Box]) -> tuple[Box, ...]:
    """Return `needed` for the output boxes of all ranks, each distinct range once."""
    if len(outs) == 1:
        return (needed(access, shape, outs[0]),)
    known: dict[Box, Box] = dict.fromkeys(outs, Box((), ()))
    columns: list[list[Range]] = []
    for axis, n in zip(access, shape, strict=True):
        if axis.out is None:
            columns.append([(0, n)] * len(known))
            continue
        reads: dict[Range, Range] = {}
        column = []
        for lo, hi in known:
            a, b = ends = (lo[axis.out], hi[axis.out])
            if ends not in reads:
                reads[ends] = span(axis.map, a, b, n)
            column.append(reads[ends])
        columns.append(column)
    if not columns:
        return (Box((), ()),) * len(outs)
    for box, cell in zip(known, zip(*columns, strict=True), strict=True):
        known[box] = Box.of(cell)
    return tuple(known[box] for box in outs)


def span(axis: AxisMap, a: int, b: int, n: int) -> Range:
    """Return the hull of the inputs in `[0, n)` that the outputs `[a, b)` read along one dimension."""
    if b <= a:
        # Nothing is read, but an empty range must still lie inside the operand.
        return (0, 0)
    lo, hi = axis.need(a, b, n)
    if 0 <= lo <= hi <= n:
        return (lo, hi)
    filled = filling(axis, a, b, n)
    if not filled:
        at = min(max(0, lo), n)
        return (at, at)
    return (min(s.source[0] for s in filled), max(s.source[1] for s in filled))
