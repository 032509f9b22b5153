"""Time one chain round by round, and put what was found into a few numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.oracle.kernels import Direction
from shardwise.runtime.calibrate.chains import Chain
from shardwise.runtime.calibrate.clock import spread
from shardwise.runtime.calibrate.pace import Pace
from shardwise.runtime.calibrate.replay import Replay, Times

Found = dict[str, dict[str, tuple[float, float, float]]]


@dataclass(frozen=True)
class Result:
    """What one rank found out about a chain.

    Args:
        found: seconds, their spread and how much shorter they are alone, by computation and direction.
        refused: why some could not be measured.
        room: bytes that each allocates at its fullest moment.
        worked, waited: seconds of computations, and of waits for the other ranks, in all rounds.
    """

    found: Found
    refused: dict[str, str]
    room: dict[tuple[str, str], float]
    worked: float
    waited: float


class Timer:
    """One rank's chain and the times of its rounds."""

    def __init__(self, chain: Chain, overhead: float, pace: Pace) -> None:
        self.replay = Replay(chain, overhead, pace)
        self.times: Times = {}
        self.totals: list[float] = []
        self.lonely: Times = {}
        self.waited = 0.0
        # The first rounds prepare kernels and buffers.
        self.replay.prepare()

    def round(self) -> None:
        """Go through the chain together with the other ranks."""
        replay, before = self.replay, self.replay.waited
        self.totals.append(self._total(self.times))
        self.waited += replay.waited - before

    def alone(self) -> None:
        """Go through the chain while nobody else does."""
        pace, self.replay.pace = self.replay.pace, None
        self._total(self.lonely)
        self.replay.pace = pace

    def _total(self, times: Times) -> float:
        before = self.replay.worked
        self.replay.round(times)
        return self.replay.worked - before

    def result(self, room: bool = True) -> Result:
        """Return what was found; what memory computations take is looked for in a round of its own."""
        more = interruptions(self.times, self.totals)
        self.replay.other_sums(self.times)
        shares = self.replay.weight_shares()
        found: Found = {}
        for (key, direction), values in self.times.items():
            usual, wide = statistics.median(values), spread(values)
            lonely = self.lonely.get((key, direction))
            alone = statistics.median(lonely) if lonely else 0.0
            faster = usual / alone if usual and alone else 1.0
            middle = more * usual
            if direction != Direction.BACKWARD_INPUT or key not in shares:
                found.setdefault(key, {})[direction] = (middle, wide, faster)
                continue
            part = shares[key]
            for name, share in ((Direction.BACKWARD_INPUT, 1 - part), (Direction.BACKWARD_WEIGHT, part)):
                if share:
                    found.setdefault(key, {})[name.value] = (share * middle, share * wide, faster)
        taken = self.replay.room() if room else {}
        return Result(found, self.replay.refused, taken, sum(self.totals), self.waited)


def interruptions(times: Times, totals: Sequence[float]) -> float:
    """Return how much longer a round takes than its computations typically take on their own.

    Something interrupts a few of them in every round, others each time; the median of each one is free of
    it, and that of a step is not.
    """
    usual = sum(statistics.median(values) * len(values) for values in times.values()) / len(totals)
    return max(1.0, statistics.median(totals) / usual) if usual else 1.0
