"""Which box of an operand a layer reads to make a box of its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.geometry.axes import AxisMap, Same
from shardwise.geometry.box import Box, Range


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
    ranges: list[Range] = []
    for axis, n in zip(access, shape, strict=True):
        if axis.out is None:
            ranges.append((0, n))
        else:
            ranges.append(axis.map.need(out.lo[axis.out], out.hi[axis.out], n))
    return tuple(ranges)


def needed(access: Access, shape: Sequence[int], out: Box) -> Box:
    """Return the box of the operand that the output box `out` reads, clipped to the operand."""
    if out.empty:
        # An empty output reads nothing, but keeps the extents of the dimensions it does not cut.
        ranges = [
            (0, 0) if axis.out is not None and out.hi[axis.out] <= out.lo[axis.out] else r
            for axis, r in zip(access, reach(access, shape, out), strict=True)
        ]
        return _clip(ranges, shape)
    return _clip(reach(access, shape, out), shape)


def _clip(ranges: Sequence[Range], shape: Sequence[int]) -> Box:
    lo = tuple(min(max(0, a), n) for (a, _), n in zip(ranges, shape, strict=True))
    hi = tuple(max(low, min(b, n)) for low, (_, b), n in zip(lo, ranges, shape, strict=True))
    return Box(lo, hi)
