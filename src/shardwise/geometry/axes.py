"""How one dimension of a layer's output depends on one dimension of its input.

Every layer is, dimension by dimension, one of a few index maps. A map answers three questions, with
n the input length, [a, b) a range of outputs, and all ranges half-open:

    size(n)             how many outputs there are
    own(bounds, n)      where the outputs are cut when the inputs are cut at `bounds`
    need(a, b, n)       which inputs the outputs [a, b) read; may reach outside [0, n): that is padding

`docs/geometry.md` derives the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shardwise.geometry.box import Range


@runtime_checkable
class AxisMap(Protocol):
    """Relate the outputs to the inputs of a layer along one dimension."""

    def size(self, n: int) -> int:
        """Return the number of outputs for `n` inputs."""
        ...

    def own(self, bounds: Sequence[int], n: int) -> tuple[int, ...]:
        """Return the cuts of the output that belong to the cuts `bounds` of the input."""
        ...

    def need(self, a: int, b: int, n: int) -> Range:
        """Return the input range that the outputs `[a, b)` read, not clipped to `[0, n)`."""
        ...


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def carry(bounds: Sequence[int], n: int, total: int, cut: Callable[[int], int]) -> tuple[int, ...]:
    """Carry the cuts of `n` inputs to `total` outputs: inner cuts by `cut`, the ends to the ends.

    A cut at the end of the input goes to the end of the output, so that outputs beyond the last input
    (padding, output padding) belong to a rank that holds pixels rather than to an empty tile behind it.
    """
    inner = [0 if c <= 0 else total if c >= n else min(total, max(0, cut(c))) for c in bounds[1:-1]]
    return (0, *inner, total)


@dataclass(frozen=True, slots=True)
class Same:
    """Output i reads input i: elementwise layers, batch and channel dimensions."""

    def size(self, n: int) -> int:
        """Return `n`."""
        return n

    def own(self, bounds: Sequence[int], n: int) -> tuple[int, ...]:
        """Return the same cuts."""
        return tuple(bounds)

    def need(self, a: int, b: int, n: int) -> Range:
        """Return the same range."""
        return (a, b)


@dataclass(frozen=True, slots=True)
class Window:
    """Output o reads inputs o*s - p + j*d for j < k: convolution and pooling.

    `pad_lo` and `pad_hi` may differ. With `ceil` the last, incomplete window counts if it starts inside
    the input or its left padding, as pooling's `ceil_mode` has it. `mode` says what the padding holds:
    "zeros" (or any constant) is filled locally, the others are read from the input (see `sources`).
    """

    kernel: int
    stride: int = 1
    pad_lo: int = 0
    pad_hi: int = 0
    dilation: int = 1
    ceil: bool = False
    mode: str = "zeros"

    @property
    def reach(self) -> int:
        """Return the distance from the first to the last input of a window, plus one."""
        return self.dilation * (self.kernel - 1) + 1

    def size(self, n: int) -> int:
        """Return the number of windows."""
        room = n + self.pad_lo + self.pad_hi - self.reach
        if not self.ceil:
            return max(0, room // self.stride + 1)
        count = ceil_div(room, self.stride) + 1
        if (count - 1) * self.stride >= n + self.pad_lo:
            count -= 1
        return max(0, count)

    def own(self, bounds: Sequence[int], n: int) -> tuple[int, ...]:
        """Give output o to the owner of input o*s, the last rank taking what is beyond."""
        return carry(bounds, n, self.size(n), lambda c: ceil_div(c, self.stride))

    def need(self, a: int, b: int, n: int) -> Range:
        """Return the hull of the windows of the outputs `[a, b)`."""
        if b <= a:
            return (a * self.stride, a * self.stride)
        return (a * self.stride - self.pad_lo, (b - 1) * self.stride - self.pad_lo + self.reach)

    def divisors(self, a: int, b: int, n: int, count_include_pad: bool) -> tuple[int, ...]:
        """Return by how much an average pooling divides the sums of the outputs `[a, b)`.

        Counted are the real pixels of each window, with `count_include_pad` also its padding, but never
        what `ceil` lets it overhang. The divisor of several dimensions is the product of theirs.
        """
        low, high = (-self.pad_lo, n + self.pad_hi) if count_include_pad else (0, n)
        starts = range(a * self.stride - self.pad_lo, b * self.stride - self.pad_lo, self.stride)
        # A window without any pixel sums to zero; dividing by one keeps it so.
        return tuple(max(1, min(start + self.reach, high) - max(start, low)) for start in starts)
