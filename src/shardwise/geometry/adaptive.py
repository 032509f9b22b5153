"""The index map of adaptive pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.geometry.axes import carry, ceil_div
from shardwise.geometry.box import Range


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Output i of `output` reads the inputs from floor(i*n/output) to ceil((i+1)*n/output)."""

    output: int

    def size(self, n: int) -> int:
        """Return the number of outputs, whatever the input."""
        return self.output

    def own(self, bounds: Sequence[int], n: int) -> tuple[int, ...]:
        """Give output i to the owner of the first input it reads."""
        return carry(bounds, n, self.output, lambda c: ceil_div(c * self.output, n))

    def need(self, a: int, b: int, n: int) -> Range:
        """Return the hull of the windows of the outputs `[a, b)`."""
        first = a * n // self.output
        return (first, ceil_div(b * n, self.output)) if b > a else (first, first)

    def windows(self, a: int, b: int, n: int) -> tuple[Range, ...]:
        """Return the input range of each of the outputs `[a, b)`."""
        return tuple((i * n // self.output, ceil_div((i + 1) * n, self.output)) for i in range(a, b))
