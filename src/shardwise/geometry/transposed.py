"""The index map of a transposed convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.geometry.axes import carry, ceil_div
from shardwise.geometry.box import Range


@dataclass(frozen=True, slots=True)
class Transposed:
    """Input i is added to the outputs i*s - p + j*d for j < k.

        inputs         0     1     2          s = 2, k = 3, p = 1
        outputs  [-1 0 1]                     the brackets are what each input reaches;
                     [1 2 3]                  output 1 reads inputs 0 and 1
                         [3 4 5]

    `output_padding` appends outputs that may see fewer inputs, or none.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    output_padding: int = 0

    @property
    def reach(self) -> int:
        """Return the distance from the first to the last output of one input, plus one."""
        return self.dilation * (self.kernel - 1) + 1

    def size(self, n: int) -> int:
        """Return the number of outputs."""
        if n <= 0:
            return 0
        return max(0, (n - 1) * self.stride - 2 * self.padding + self.reach + self.output_padding)

    def own(self, bounds: Sequence[int], n: int) -> tuple[int, ...]:
        """Give the outputs `[i*s, (i+1)*s)` to the owner of input i, the last rank taking what is beyond."""
        return carry(bounds, n, self.size(n), lambda c: c * self.stride)

    def need(self, a: int, b: int, n: int) -> Range:
        """Return the inputs that reach any of the outputs `[a, b)`: none, where strides leave gaps."""
        first = min(n, max(0, ceil_div(a + self.padding - self.reach + 1, self.stride)))
        if b <= a:
            return (first, first)
        return (first, max(first, min(n, (b - 1 + self.padding) // self.stride + 1)))

    def origin(self, first: int) -> int:
        """Return the output at which a run on the inputs from `first` on, with padding 0, begins."""
        return first * self.stride - self.padding
