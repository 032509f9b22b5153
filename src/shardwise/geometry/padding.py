"""What stands in the padding around an image: nothing, or pixels of the image itself.

      circular      replicate       reflect
    c d|a b c d|a   a a|a b c d|d   c b|a b c d|c

Zeros (or another constant) are filled in locally. The other modes read the image, so a padded range is a
union of segments of it, some of them reversed, possibly owned by a far rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.geometry.axes import AxisMap, Window, carry
from shardwise.geometry.box import Range

CONSTANT = ("zeros", "constant")


@dataclass(frozen=True, slots=True)
class Segment:
    """Fill the positions `at` of a padded buffer from the inputs `source`.

    Positions count from the start of the buffer. A `source` of one input fills all of `at` with it;
    `reversed` means that its last input comes first.
    """

    at: Range
    source: Range
    reversed: bool = False


def sources(lo: int, hi: int, n: int, mode: str) -> tuple[Segment, ...]:
    """Return which of `n` inputs fill the positions `[lo, hi)`, of which some may lie outside.

    Positions that no segment names hold the constant. The segments are in order and do not overlap.
    """
    if mode in CONSTANT:
        inside = (max(lo, 0), min(hi, n))
        return (Segment((inside[0] - lo, inside[1] - lo), inside),) if inside[0] < inside[1] else ()
    if mode not in _PERIODS:
        raise ValueError(f"padding mode {mode!r} is unknown; use zeros, constant, {', '.join(_PERIODS)}")
    if n < 1 and lo < hi:
        raise ValueError(f"{mode} padding needs at least one pixel to copy, the input has {n}")
    return tuple(_PERIODS[mode](lo, hi, n))


def _circular(lo: int, hi: int, n: int) -> Iterator[Segment]:
    start = lo
    while start < hi:
        turn = start // n * n
        stop = min(hi, turn + n)
        yield Segment((start - lo, stop - lo), (start - turn, stop - turn))
        start = stop


def _replicate(lo: int, hi: int, n: int) -> Iterator[Segment]:
    before, after = min(hi, 0), max(lo, n)
    if lo < before:
        yield Segment((0, before - lo), (0, 1))
    if max(lo, 0) < min(hi, n):
        yield Segment((max(lo, 0) - lo, min(hi, n) - lo), (max(lo, 0), min(hi, n)))
    if after < hi:
        yield Segment((after - lo, hi - lo), (n - 1, n))


def _reflect(lo: int, hi: int, n: int) -> Iterator[Segment]:
    if n == 1:
        if lo < 0 or hi > 1:
            raise ValueError("reflect padding needs at least two pixels, the input has one")
        yield from _replicate(lo, hi, n)
        return
    # One period runs 0, 1 .. n-1 upwards and n-2 .. 1 downwards: the edges are not repeated.
    period = 2 * (n - 1)
    start = lo
    while start < hi:
        turn = start // period * period
        if start - turn < n:
            stop = min(hi, turn + n)
            yield Segment((start - lo, stop - lo), (start - turn, stop - turn))
        else:
            stop = min(hi, turn + period)
            mirrored = (period - (stop - 1 - turn), period - (start - turn) + 1)
            yield Segment((start - lo, stop - lo), mirrored, reversed=True)
        start = stop


_PERIODS: dict[str, Callable[[int, int, int], Iterator[Segment]]] = {
    "reflect": _reflect,
    "replicate": _replicate,
    "circular": _circular,
}


@dataclass(frozen=True, slots=True)
class Padded:
    """Output o reads input o - lo: padding as a layer of its own; negative pads crop."""

    lo: int
    hi: int
    mode: str = "zeros"

    def size(self, n: int) -> int:
        """Return the padded length."""
        return max(0, n + self.lo + self.hi)

    def own(self, bounds: Sequence[int], n: int) -> tuple[int, ...]:
        """Give each pixel to its owner and the padding to the owners of the ends."""
        return carry(bounds, n, self.size(n), lambda c: c + self.lo)

    def need(self, a: int, b: int, n: int) -> Range:
        """Return the positions of the outputs `[a, b)` on the input's scale; padding lies outside."""
        return (a - self.lo, b - self.lo) if b > a else (a - self.lo, a - self.lo)


def filling(axis: AxisMap, a: int, b: int, n: int) -> tuple[Segment, ...]:
    """Return which inputs fill the range `axis.need(a, b, n)`, whatever the map and its padding mode."""
    lo, hi = axis.need(a, b, n)
    if isinstance(axis, Padded) and axis.mode == "circular":
        # Where one side is cropped, the image that wraps around is the cropped one.
        first, length = max(0, -axis.lo), n + min(0, axis.lo) + min(0, axis.hi)
        wrapped = sources(lo - first, hi - first, length, axis.mode)
        return tuple(Segment(s.at, (s.source[0] + first, s.source[1] + first)) for s in wrapped)
    return sources(lo, hi, n, axis.mode if isinstance(axis, (Window, Padded)) else "zeros")
