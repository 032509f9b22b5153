"""Index maps that only pick or regroup: slices, concatenations, channel groups, pixel shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.geometry.axes import carry, ceil_div
from shardwise.geometry.box import Range


@dataclass(frozen=True, slots=True)
class Part:
    """Output o reads input o*step + offset, where there is such an input.

    A slice has its start as `offset`. An operand of a concatenation that begins at output s has
    `offset=-s`; outputs that belong to its neighbours read nothing of it. `length` is the number of
    outputs; without it they end with the input.
    """

    offset: int
    length: int | None = None
    step: int = 1

    def size(self, n: int) -> int:
        """Return the number of outputs."""
        return self.length if self.length is not None else max(0, ceil_div(n - self.offset, self.step))

    def own(self, bounds: Sequence[int], n: int) -> tuple[int, ...]:
        """Give output o to the owner of the input it reads, and what lies outside to the nearest."""
        return carry(bounds, n, self.size(n), lambda c: ceil_div(c - self.offset, self.step))

    def need(self, a: int, b: int, n: int) -> Range:
        """Return the inputs that the outputs `[a, b)` read; empty if there are none."""
        first, last = self.outputs(a, b, n)
        if last <= first:
            at = min(n, max(0, a * self.step + self.offset))
            return (at, at)
        return (first * self.step + self.offset, (last - 1) * self.step + self.offset + 1)

    def outputs(self, a: int, b: int, n: int) -> Range:
        """Return those of the outputs `[a, b)` that read an input, as a range that may be empty."""
        first = max(a, ceil_div(-self.offset, self.step))
        return (first, max(first, min(b, ceil_div(n - self.offset, self.step))))


@dataclass(frozen=True, slots=True)
class Groups:
    """Each group of `outputs` output channels reads the `inputs` input channels of the same group."""

    inputs: int
    outputs: int

    def size(self, n: int) -> int:
        """Return the number of output channels."""
        return n // self.inputs * self.outputs

    def own(self, bounds: Sequence[int], n: int) -> tuple[int, ...]:
        """Give a whole group to the owner of its first input channel."""
        return carry(bounds, n, self.size(n), lambda c: ceil_div(c, self.inputs) * self.outputs)

    def need(self, a: int, b: int, n: int) -> Range:
        """Return the input channels of all groups that `[a, b)` touches."""
        first = a // self.outputs * self.inputs
        return (first, ceil_div(b, self.outputs) * self.inputs) if b > a else (first, first)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Outputs are finer or coarser than the inputs by a ratio: the pixels of a pixel shuffle."""

    numerator: int
    denominator: int = 1

    def size(self, n: int) -> int:
        """Return the number of outputs."""
        return n * self.numerator // self.denominator

    def own(self, bounds: Sequence[int], n: int) -> tuple[int, ...]:
        """Give output o to the owner of the first input that it reads."""
        return carry(bounds, n, self.size(n), lambda c: ceil_div(c * self.numerator, self.denominator))

    def need(self, a: int, b: int, n: int) -> Range:
        """Return the inputs that the outputs `[a, b)` lie upon."""
        first = a * self.denominator // self.numerator
        return (first, ceil_div(b * self.denominator, self.numerator)) if b > a else (first, first)
