"""How one dimension of a layer's output depends on one dimension of its input.

Every layer is, dimension by dimension, one of a few index maps. A map answers three questions, with
n the input length, [a, b) a range of outputs, and all ranges half-open:

    size(n)             how many outputs there are
    own(bounds, n)      where the outputs are cut when the inputs are cut at `bounds`
    need(a, b, n)       which inputs the outputs [a, b) read; may reach outside [0, n): that is padding

`docs/geometry.md` derives the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    the input or its left padding, as pooling's `ceil_mode` has it.
    """

    kernel: int
    stride: int = 1
    pad_lo: int = 0
    pad_hi: int = 0
    dilation: int = 1
    ceil: bool = False

    @property
    def reach(self) -> int:
        """Return the distance from the first to the last input of a window, plus one."""
        return self.dilation * (self.kernel - 1) + 1

    def size(self, n: int) -> int:
        """Return the number of windows."""
        room = n + self.pad_lo + self.pad_hi - self.reach
        if not self.ceil:
            return max(0, room // self.stride + 1)
        count = -(-room // self.stride) + 1
        if (count - 1) * self.stride >= n + self.pad_lo:
            count -= 1
        return max(0, count)

    def own(self, bounds: Sequence[int], n: int) -> tuple[int, ...]:
        """Give output o to the owner of input o*s, the last rank taking what is beyond."""
        total = self.size(n)
        inner = [min(total, -(-cut // self.stride)) for cut in bounds[1:-1]]
        return (0, *inner, total)

    def need(self, a: int, b: int, n: int) -> Range:
        """Return the hull of the windows of the outputs `[a, b)`."""
        if b <= a:
            return (a * self.stride, a * self.stride)
        return (a * self.stride - self.pad_lo, (b - 1) * self.stride - self.pad_lo + self.reach)
