"""Cut a list of costs into consecutive parts of one width, or a first part of another: no table per stage.

The part i..j takes e(j) - a(i) with e = P/width + boundary and a = P/width - boundary, P the running sum of
costs. So of all ends that k parts within T can reach only the largest a matters for what follows:

    A_0 = a(0),    A_k = max { a(j) : e(j) <= T + A_(k-1) }

and the end n is reached by at most k parts if e(n) <= T + A_(k-1). (An end before the one with the largest a
may be counted too early, but its own a is smaller, or it would have been the largest one.) With the ends
sorted by e this is one bisection per part. The same from the other side says which ends leave a rest that few
enough parts can take; between the two the cuts nearest to even shares are taken.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Forgives the rounding of the sums, so that an exact bottleneck counts as met.
_SLACK = 1 + 1e-13


class Ladder:
    """Find the least time within which at most so many parts cover all layers.

    Args:
        sums: running sum of the costs, beginning with 0.
        boundary: what a cut at each place costs the parts on both sides; 0 at both ends.
        first: width of the first part.
        width: width of all others.
        parts: how many there are.
    """

    def __init__(self, sums: Floats, boundary: Floats, first: int, width: int, parts: int) -> None:
        self.sums: list[float] = sums.tolist()
        self.n, self.parts = len(self.sums) - 1, parts
        self.widths = (first, width)
        self.boundary: list[float] = boundary.tolist()
        ends = [(sums / w + boundary)[1:-1] for w in self.widths]
        starts = (sums / width - boundary)[1:-1]
        self.final = [self.sums[-1] / w for w in self.widths]
        self.heads = [_best(end, starts) for end in ends]
        # The way back: the least e among the ends whose a is large enough, with both signs turned.
        self.tails = _best(-starts, -ends[1])
        self.starts: list[float] = [0.0, *starts.tolist(), self.final[1]]
        self.ends = [[0.0, *end.tolist(), final] for end, final in zip(ends, self.final, strict=True)]

    def reaches(self, limit: float) -> bool:
        """Tell whether at most so many parts within the limit cover all layers."""
        limit *= _SLACK
        if limit >= self.final[0]:
            return True
        values, best = self.heads[0]
        at = bisect.bisect_right(values, limit)
        if not at:
            return False
        start, final = best[at - 1], self.final[1]
        values, best = self.heads[1]
        for _ in range(self.parts - 1):
            if limit + start >= final:
                return True
            at = bisect.bisect_right(values, limit + start)
            if not at or best[at - 1] <= start:
                return False
            start = best[at - 1]
        return False

    def trace(self, limit: float) -> tuple[int, ...] | None:
        """Return cuts into exactly so many parts within the limit, near even shares; None if not found."""
        limit *= _SLACK
        needs = self._needs(limit)
        first, width = self.widths
        share = self.sums[-1] / (first + width * (self.parts - 1))
        cuts, here, reach = [], 0, limit
        for k in range(1, self.parts):
            left = self.parts - k
            wanted = share * (first + width * (k - 1))
            found = self._nearest(self.ends[k > 1], here, self.n - left, wanted, reach, needs[left])
            if found is None:
                return None
            cuts.append(found)
            here, reach = found, limit + self.starts[found]
        return tuple(cuts) if self.parts == 1 or self.final[1] <= reach else None

    def _needs(self, limit: float) -> list[float]:
        """Return for each number of parts the least a from which they reach the end."""
        end, needs = self.final[1], [float("inf"), self.final[1] - limit]
        values, best = self.tails
        for _ in range(2, self.parts + 1):
            at = bisect.bisect_right(values, limit - end)
            if at:
                end = min(end, -best[at - 1])
            needs.append(end - limit)
        return needs

    def _nearest(
        self, ends: Sequence[float], here: int, last: int, wanted: float, reach: float, need: float
    ) -> int | None:
        """Return the admissible end behind `here` whose sum is nearest to what is wanted."""
        sums, starts = self.sums, self.starts
        right = min(max(bisect.bisect_left(sums, wanted), here + 1), last + 1)
        left = right - 1
        while left > here or right <= last:
            goes_left = right > last or (left > here and wanted - sums[left] <= sums[right] - wanted)
            j = left if goes_left else right
            if ends[j] <= reach and starts[j] >= need:
                return j
            if goes_left:
                left -= 1
            else:
                right += 1
        return None


def even(sums: Floats, widths: Sequence[int]) -> tuple[int, ...]:
    """Return cuts near even shares, without regard to boundaries; no part is empty."""
    n, parts = len(sums) - 1, len(widths)
    shares = sums[-1] * np.cumsum(widths)[:-1] / sum(widths)
    near = np.searchsorted(sums, shares).tolist()
    cuts, last = [], 0
    for k, j in enumerate(near, 1):
        last = min(max(j, last + 1), n - parts + k)
        cuts.append(last)
    return tuple(cuts)


def _best(keys: Floats, values: Floats) -> tuple[list[float], list[float]]:
    """Return the keys in rising order and the largest value up to each of them."""
    order = np.argsort(keys, kind="stable")
    return keys[order].tolist(), list(itertools.accumulate(values[order].tolist(), max))
