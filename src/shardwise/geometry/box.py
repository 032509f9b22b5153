"""A half-open N-dimensional index range of a global tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Range = tuple[int, int]
"""A half-open range of indices `(lo, hi)` along one dimension; `hi <= lo` means empty."""


class _Ends(NamedTuple):
    lo: tuple[int, ...]
    hi: tuple[int, ...]


class Box(_Ends):
    """Name the elements `lo[d] <= i < hi[d]` of a global tensor, for every dimension `d`.

    A tuple, since plans for many ranks make and compare hundreds of thousands of them.
    """

    __slots__ = ()

    def __new__(cls, lo: tuple[int, ...], hi: tuple[int, ...]) -> Box:
        """Refuse corners of different dimensions."""
        if len(lo) != len(hi):
            raise ValueError(f"Box: lo has {len(lo)} dimensions, hi has {len(hi)}; they must agree")
        return tuple.__new__(cls, (lo, hi))

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Return the box of all elements of a tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @staticmethod
    def of(ranges: Iterable[Range]) -> Box:
        """Build a box from one `(lo, hi)` pair per dimension."""
        ends = tuple(zip(*ranges, strict=True))
        return tuple.__new__(Box, ends or ((), ()))

    @property
    def ndim(self) -> int:
        """Return the number of dimensions."""
        return len(self.lo)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Return one `(lo, hi)` pair per dimension."""
        return tuple(zip(self.lo, self.hi, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the extent along each dimension, zero where empty."""
        return tuple(max(0, hi - lo) for lo, hi in zip(self.lo, self.hi, strict=True))

    @property
    def size(self) -> int:
        """Return the number of elements."""
        product = 1
        # Of equal length, as all boxes' ends are: to check that again takes as long as to multiply.
        for lo, hi in zip(*self):  # noqa: B905
            if hi <= lo:
                return 0
            product *= hi - lo
        return product

    @property
    def empty(self) -> bool:
        """Tell whether the box holds no element."""
        # A plain loop: this and `meets` are asked millions of times for deep networks on many ranks.
        for lo, hi in zip(*self):  # noqa: B905, SIM110
            if hi <= lo:
                return True
        return False

    def meets(self, other: Box) -> bool:
        """Tell whether the two boxes have an element in common."""
        for a, b, c, d in zip(self.lo, self.hi, other.lo, other.hi, strict=True):
            if (b if b < d else d) <= (a if a > c else c):
                return False
        return True

    def intersect(self, other: Box) -> Box:
        """Return the common part; an empty box if there is none."""
        self._alike(other)
        lo = tuple(map(max, self.lo, other.lo))
        return Box(lo, tuple(map(max, lo, map(min, self.hi, other.hi))))

    def hull(self, other: Box) -> Box:
        """Return the smallest box that contains both; an empty box adds nothing."""
        self._alike(other)
        if self.empty:
            return other
        if other.empty:
            return self
        return Box(tuple(map(min, self.lo, other.lo)), tuple(map(max, self.hi, other.hi)))

    def _alike(self, other: Box) -> None:
        if len(self.lo) != len(other.lo):
            raise ValueError(f"Box: {self} and {other} have different numbers of dimensions")

    def contains(self, other: Box) -> bool:
        """Tell whether every element of `other` is in this box."""
        for a, b, c, d in zip(self.lo, self.hi, other.lo, other.hi, strict=True):
            if c < a or d > b:
                return other.empty
        return True

    def shift(self, offset: Sequence[int]) -> Box:
        """Return the box moved by `offset`."""
        return Box(
            tuple(a + o for a, o in zip(self.lo, offset, strict=True)),
            tuple(a + o for a, o in zip(self.hi, offset, strict=True)),
        )

    def replace(self, dim: int, span: Range) -> Box:
        """Return the box with another range along `dim`."""
        lo, hi = list(self.lo), list(self.hi)
        lo[dim], hi[dim] = span
        return Box(tuple(lo), tuple(hi))

    def slices(self, within: Box | None = None) -> tuple[slice, ...]:
        """Return the slices that pick this box from a tensor that stores `within` (default: all)."""
        origin = within.lo if within is not None else (0,) * self.ndim
        return tuple(
            slice(lo - o, max(lo, hi) - o) for lo, hi, o in zip(self.lo, self.hi, origin, strict=True)
        )

    def minus(self, other: Box) -> Iterator[Box]:
        """Yield disjoint boxes that together are this box without `other`."""
        if not self.meets(other):
            if not self.empty:
                yield self
            return
        lo, hi = self
        for dim, (first, last) in enumerate(zip(*other, strict=True)):
            if lo[dim] < first:
                yield Box(lo, (*hi[:dim], first, *hi[dim + 1 :]))
                lo = (*lo[:dim], first, *lo[dim + 1 :])
            if last < hi[dim]:
                yield Box((*lo[:dim], last, *lo[dim + 1 :]), hi)
                hi = (*hi[:dim], last, *hi[dim + 1 :])

    def __str__(self) -> str:
        return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in self.ranges) + "]"
