"""Cut a list of costs into consecutive parts so that the slowest part is as fast as possible.

A binary search on the time of the slowest part; whether a time is enough is one pass over the stages:

    ends after stage s = positions j for which some end i of stage s-1 leaves a part i..j that is fast enough

The part i..j takes (P[j] - P[i]) / width + boundary[i] + boundary[j] with P the running sum of costs, so
the best i of an admissible window is the one with the largest P[i] / width - boundary[i]: a range maximum.
Where memory is no limit and all stages (but the first) are equally wide, `parametric` finds the same time in
a fraction of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.plan.parametric import Ladder, even

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
_CLOSE = 1e-10


class Balance:
    """Hold the sums of one cutting problem.

    Args:
        costs: seconds (or any unit) of each layer on one rank.
        widths: how many times faster each stage is.
        boundary: seconds that a cut before layer i costs the stages on both sides, i = 1 .. n-1.
        lowest: for each stage and each end j the first i that memory admits; None: all of them.
    """

    def __init__(
        self,
        costs: Sequence[float],
        widths: Sequence[int],
        boundary: Sequence[float] | None,
        lowest: Sequence[Indices] | None = None,
    ) -> None:
        self.n, self.widths, self.limited = len(costs), widths, lowest is not None
        self.lowest = lowest or [np.zeros(self.n + 1, dtype=np.intp)] * len(widths)
        self.sums = np.concatenate(([0.0], np.cumsum(np.asarray(costs, dtype=np.float64))))
        self.boundary = np.zeros(self.n + 1)
        if boundary is not None:
            self.boundary[1 : self.n] = np.asarray(boundary, dtype=np.float64)

    def slowest(self, cuts: Sequence[int]) -> float:
        """Return the time of the slowest part."""
        bounds = np.array([0, *cuts, self.n])
        sums, edge = self.sums[bounds], self.boundary[bounds]
        return float(np.max(np.diff(sums) / np.asarray(self.widths) + edge[:-1] + edge[1:]))

    @cached_property
    def windows(self) -> list[Windows]:
        """Return the admissible windows of every stage."""
        known = {id(low): Windows(low) for low in self.lowest}
        return [known[id(low)] for low in self.lowest]

    def best(self) -> tuple[int, ...] | None:
        """Return the cuts whose slowest part is fastest; None if memory admits none."""
        low = float(self.sums[-1]) / sum(self.widths)
        if not self.limited and len(set(self.widths[1:])) <= 1:
            low, cuts = self._equal_widths(low)
        else:
            found = self.within(np.inf)
            if found is None:
                return None
            cuts = found
        high = self.slowest(cuts)
        # Mostly nothing is better than cuts of equal widths; that is soon seen.
        middle = high * (1 - _CLOSE / 2)
        while high - low > _CLOSE * high:
            found = self.within(middle)
            if found is None:
                low = middle
            else:
                cuts, high = found, min(self.slowest(found), middle)
            middle = (low + high) / 2
            if not low < middle < high:
                break  # no number lies between them
        return cuts

    def _equal_widths(self, low: float) -> tuple[float, tuple[int, ...]]:
        """Return a time that no cuts can beat, and good cuts: mostly such that need no more than that."""
        cuts = even(self.sums, self.widths)
        high = self.slowest(cuts)
        low = max(low, float(np.max(np.diff(self.sums))) / max(self.widths))
        ladder = Ladder(self.sums, self.boundary, self.widths[0], self.widths[-1], len(self.widths))
        # Cuts that are found show how much of the limit they need; mostly nothing is better.
        found: tuple[int, ...] | None = None
        limit, best = (low + high) / 2, high
        while best - low > _CLOSE / 2 * best:
            if not ladder.reaches(limit):
                low, limit = limit, (limit + best) / 2
                if not low < limit < best:
                    break
                continue
            found, best = ladder.trace(limit), limit
            if found is not None:
                best = self.slowest(found)
            limit = best * (1 - _CLOSE / 4) if found is not None else (low + best) / 2
            if found is not None and not ladder.reaches(limit):
                return limit, found
            limit = (low + best) / 2
            if not low < limit < best:
                break
        # So few parts may not be enough of them: with every further cut both of its parts pay for it.
        bottom, limit = low, best
        while high - bottom > _CLOSE / 2 * high:
            found = ladder.trace(limit)
            if found is not None:
                cuts, high = found, min(high, self.slowest(found))
            else:
                bottom = limit
            limit = (bottom + high) / 2
            if not bottom < limit < high:
                break
        return low, cuts

    def within(self, limit: float) -> tuple[int, ...] | None:
        """Return cuts whose slowest part takes at most `limit`, as even as may be; None if there are none."""
        ends = [np.zeros(self.n + 1, dtype=bool)]
        ends[0][0] = True
        for stage, width in enumerate(self.widths):
            gain = np.where(ends[-1], self.sums / width - self.boundary, -np.inf)
            best = self.windows[stage].maxima(gain)
            # The slack forgives the rounding of the sums, so that an exact bottleneck counts as met.
            time = self.sums / width + self.boundary - best
            ends.append(np.isfinite(best) & (time <= limit * (1 + 1e-13)))
        return self._trace(ends, limit) if ends[-1][self.n] else None

    def _trace(self, ends: Sequence[NDArray[np.bool_]], limit: float) -> tuple[int, ...]:
        """Walk back from the last layer, choosing of all admissible cuts the one nearest to an even share."""
        shares = self.sums[-1] * np.cumsum(self.widths) / sum(self.widths)
        cuts, end = [], self.n
        for stage in range(len(self.widths) - 1, 0, -1):
            width = self.widths[stage]
            first = int(self.lowest[stage][end])
            starts = np.arange(first, end)
            time = (self.sums[end] - self.sums[first:end]) / width + self.boundary[first:end]
            admissible = starts[ends[stage][first:end] & (time + self.boundary[end] <= limit * (1 + 1e-12))]
            end = int(admissible[np.argmin(np.abs(self.sums[admissible] - shares[stage - 1]))])
            cuts.append(end)
        return tuple(reversed(cuts))


class Windows:
    """Answer, for fixed windows low[j] .. j-1, what the maximum of changing values in each of them is."""

    def __init__(self, low: Indices) -> None:
        length = np.arange(len(low)) - low
        self.n = len(low)
        self.levels: list[tuple[int, Indices, Indices, Indices]] = []
        # Every window is the union of two windows whose length is a power of two.
        for size in (1 << k for k in range(int(length.max()).bit_length())):
            rows = np.nonzero((length >= size) & (length < 2 * size))[0]
            self.levels.append((size, rows, low[rows], rows - size))

    def maxima(self, values: Floats) -> Floats:
        """Return the maximum of `values` in every window, -inf in empty ones."""
        table, result = values, np.full(self.n, -np.inf)
        for size, rows, left, right in self.levels:
            result[rows] = np.maximum(table[left], table[right])
            table = np.maximum(table[:-size], table[size:])
        return result
