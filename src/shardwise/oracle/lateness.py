"""By how much ranks that did the same are late when they meet: the slowest of them decides.

Meetings are put together by the length of what was done before them. A processor that is slow for a moment
delays short bits of work by as large a part as long ones, an interruption delays short ones by a larger part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from shardwise.machine.curve import Points

_SHORTEST = 1e-6
# Lengths within this factor of each other count as one.
_FACTOR = 4.0


class Met(NamedTuple):
    """How often ranks met, and the seconds that they had worked and then waited, all ranks together."""

    times: float
    worked: float
    waited: float

    def plus(self, other: Met) -> Met:
        """Return both together."""
        return Met(*(a + b for a, b in zip(self, other, strict=True)))


# By length: the number of factors beyond the shortest.
Meetings = dict[int, Met]


def by_length(meetings: Iterable[tuple[float, float]]) -> Meetings:
    """Put meetings, each behind some seconds of work and with some of waiting, together by length."""
    found: Meetings = {}
    for worked, waited in meetings:
        length = round(math.log(max(worked, _SHORTEST) / _SHORTEST, _FACTOR))
        add_meetings(found, {length: Met(1.0, worked, waited)})
    return found


def add_meetings(total: Meetings, more: Meetings) -> None:
    """Add meetings to others."""
    for length, met in more.items():
        total[length] = total[length].plus(met) if length in total else met


def typical_meetings(ranks: Sequence[Sequence[Meetings]]) -> Meetings:
    """Return the meetings of a typical round, from those of every rank in every round.

    One of two ranks waits at a time, so they are added up first; the median of the rounds is that of steps.
    """
    rounds: list[Meetings] = []
    for parts in zip(*ranks, strict=False):
        together: Meetings = {}
        for part in parts:
            add_meetings(together, part)
        rounds.append(together)
    nothing = Met(0.0, 0.0, 0.0)
    return {
        length: Met(
            *(median(values) for values in zip(*(r.get(length, nothing) for r in rounds), strict=True))
        )
        for length in sorted({length for found in rounds for length in found})
    }


def lateness(meetings: Meetings) -> Points:
    """Return over the seconds of what ranks did by which part of it they are late."""
    points: list[tuple[float, float]] = []
    for _, met in sorted(meetings.items()):
        if met.worked > 0.0 and (not points or met.worked / met.times > points[-1][0]):
            points.append((met.worked / met.times, met.waited / met.worked))
    return tuple(points)
