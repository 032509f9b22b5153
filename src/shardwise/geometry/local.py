"""What a rank does along one dimension to make a range of outputs from the inputs it holds.

held        [ . . . . . . . . . ]
crop            [ . . . . . . . ]         what the outputs really read
pad                             [0 0]     what the image's edge took away
kernel          runs with padding 0
out_crop        [ . . . . ]               for a transposed convolution its ends overhang
out_fill                    [0]           and where no input reaches the output is zero
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

from shardwise.geometry.access import SAME, Access, needed, span
from shardwise.geometry.axes import AxisMap, Window
from shardwise.geometry.box import Box, Range
from shardwise.geometry.padding import CONSTANT, Padded, Segment, filling
from shardwise.geometry.parts import Part
from shardwise.geometry.transposed import Transposed


@dataclass(frozen=True, slots=True)
class LocalWindow:
    """Say what to cut, fill and keep so that a kernel with padding 0 makes exactly the wanted outputs.

    Args:
        crop: the inputs to use, counted from the start of what is held.
        out_crop: which of the outputs of the kernel's run to keep.
        out_size: the number of outputs wanted: the kept ones and the filled ones.
        pad: how many constants to put before and after the cropped inputs.
        out_fill: how many zeros to put before and after the kept outputs.
        segments: where the padding is read from the image, how to fill the kernel's input from what is
            held; then they replace `crop` and `pad`. Empty for constant padding and away from the edges.
    """

    crop: Range
    out_crop: Range
    out_size: int
    pad: Range = (0, 0)
    out_fill: Range = (0, 0)
    segments: tuple[Segment, ...] = ()

    @property
    def in_size(self) -> int:
        """Return the length of the kernel's input: cropped and padded."""
        if self.segments:
            return self.segments[-1].at[1]
        return self.crop[1] - self.crop[0] + sum(self.pad)

    @property
    def plain(self) -> bool:
        """Tell whether the kernel's outputs on the cropped inputs are the wanted ones as they are."""
        return not self.segments and self.pad == self.out_fill == (0, 0)


def local(axis: AxisMap, a: int, b: int, n: int, held: Range) -> LocalWindow:
    """Return how to make the outputs `[a, b)` from `held`, a range of the `n` inputs.

    Raises:
        ValueError: if `held` misses an input that the outputs read.
    """
    if b <= a:
        return LocalWindow((0, 0), (0, 0), 0)
    lo, hi = span(axis, a, b, n)
    if lo < hi and not (held[0] <= lo and hi <= held[1]):
        raise ValueError(
            f"{axis}: the outputs [{a}, {b}) read the inputs [{lo}, {hi}) of {n}, held are only "
            f"[{held[0]}, {held[1]}); fetch the missing ones first"
        )
    crop = (lo - held[0], hi - held[0]) if lo < hi else (0, 0)
    return _local(axis, a, b, n, crop, held)


def local_box(access: Access, shape: Sequence[int], out: Box, held: Box) -> tuple[LocalWindow, ...]:
    """Return, for each dimension of an operand, how to make the box `out` from the box `held` of it.

    Dimensions that are read whole must be held whole; they count as `Same` over their full range. Where
    one dimension reads nothing (it lies in the padding, or in the gaps of a transposed convolution) the
    box reads nothing at all, and every dimension is filled with constants.
    """
    nothing = out.empty or needed(access, shape, out).empty
    windows = []
    for axis, n, span_ in zip(access, shape, held.ranges, strict=True):
        map_, a, b = (SAME, 0, n) if axis.out is None else (axis.map, out.lo[axis.out], out.hi[axis.out])
        if nothing:
            windows.append(_blank(map_, a, max(a, b), n))
        else:
            windows.append(local(map_, a, b, n, span_))
    return tuple(windows)


@singledispatch
def _blank(axis: AxisMap, a: int, b: int, n: int) -> LocalWindow:
    lo, hi = axis.need(a, b, n)
    return LocalWindow((0, 0), (0, b - a), b - a, pad=(hi - lo, 0))


@_blank.register(Transposed)
@_blank.register(Part)
def _(axis: Transposed | Part, a: int, b: int, n: int) -> LocalWindow:
    return LocalWindow((0, 0), (0, 0), b - a, out_fill=(b - a, 0))


@singledispatch
def _local(axis: AxisMap, a: int, b: int, n: int, crop: Range, held: Range) -> LocalWindow:
    return LocalWindow(crop, (0, b - a), b - a)


@_local.register(Window)
@_local.register(Padded)
def _(axis: Window | Padded, a: int, b: int, n: int, crop: Range, held: Range) -> LocalWindow:
    lo, hi = axis.need(a, b, n)
    if lo >= 0 and hi <= n:
        return LocalWindow(crop, (0, b - a), b - a)
    if axis.mode in CONSTANT:
        pad = (max(0, min(hi, 0) - lo), max(0, hi - max(lo, n)))
        return LocalWindow(crop, (0, b - a), b - a, pad=pad)
    segments = tuple(
        Segment(s.at, (s.source[0] - held[0], s.source[1] - held[0]), s.reversed)
        for s in filling(axis, a, b, n)
    )
    return LocalWindow(crop, (0, b - a), b - a, segments=segments)


@_local.register
def _(axis: Transposed, a: int, b: int, n: int, crop: Range, held: Range) -> LocalWindow:
    inputs = crop[1] - crop[0]
    made = (inputs - 1) * axis.stride + axis.reach if inputs else 0
    origin = axis.origin(crop[0] + held[0])
    first, last = (min(made, max(0, end - origin)) for end in (a, b))
    before = min(b - a, max(0, origin - a)) if first < last else 0
    return LocalWindow(crop, (first, last), b - a, out_fill=(before, b - a - before - (last - first)))


@_local.register
def _(axis: Part, a: int, b: int, n: int, crop: Range, held: Range) -> LocalWindow:
    first, last = axis.outputs(a, b, n)
    if first >= last:
        return LocalWindow((0, 0), (0, 0), b - a, out_fill=(b - a, 0))
    return LocalWindow(crop, (0, last - first), b - a, out_fill=(first - a, b - last))
