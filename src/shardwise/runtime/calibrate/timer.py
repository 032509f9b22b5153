"""Time one chain round by round, and put what was found into a few numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.oracle.kernels import Direction
from shardwise.oracle.lateness import Meetings, by_length
from shardwise.oracle.moves import Move
from shardwise.runtime.calibrate.chains import Chain
from shardwise.runtime.calibrate.clock import spread
from shardwise.runtime.calibrate.pace import Crowd, Pace
from shardwise.runtime.calibrate.replay import Replay, Times
from shardwise.runtime.calibrate.values import Weights
from shardwise.runtime.order import FIRST, Order


class Timing(NamedTuple):
    """A time, its spread, how much shorter it is alone, and how much longer on a core in a crowd."""

    seconds: float
    spread: float
    alone: float = 1.0
    crowded: float = 0.0

    def part(self, share: float) -> Timing:
        """Return the timing of a part of the computation."""
        return self._replace(seconds=share * self.seconds, spread=share * self.spread)


Found = dict[str, dict[str, Timing]]


@dataclass(frozen=True)
class Result:
    """What one rank found out about a chain.

    Args:
        found: by computation and direction.
        refused: why some could not be measured.
        room: bytes that each allocates at its fullest moment.
        rounds: how the rank met the others in each of them.
    """

    found: Found
    refused: dict[str, str]
    room: dict[tuple[str, str], float]
    rounds: tuple[Meetings, ...] = ()


class Findings(NamedTuple):
    """What one rank found out about some chains, and the seconds of sums of gradients meanwhile."""

    chains: list[Result]
    sums: dict[Move, float]


class Timer:
    """One rank's chain and the times of its rounds."""

    def __init__(
        self, chain: Chain, overhead: float, pace: Pace, order: Order = FIRST, weights: Weights | None = None
    ) -> None:
        self.chain = chain
        self.replay = Replay(chain, overhead, pace, order, weights)
        self.times: Times = {}
        self.totals: list[float] = []
        self.lonely: Times = {}
        self.squeezed: Times = {}
        self.squeezed_totals: list[float] = []
        self.squeezed_waits: list[float] = []
        self.rounds: list[Meetings] = []
        # The first rounds prepare kernels and buffers.
        self.replay.prepare()

    def visit(self) -> None:
        """Go through the chain twice and time the second: it finds what the first left, as steps do."""
        self.replay.round({})
        self.replay.meetings.clear()
        self.totals.append(self._total(self.times))
        self.rounds.append(by_length(self.replay.meetings))

    def alone(self) -> None:
        """Do the same while nobody else does."""
        pace, self.replay.pace = self.replay.pace, None
        self.replay.round({})
        self._total(self.lonely)
        self.replay.pace = pace

    def crowded(self, crowd: Crowd) -> None:
        """Do the same together with more ranks than cores, and count the time on a core only.

        What the waits for each other take of a core counts too: nobody else can compute there meanwhile.
        """
        replay = self.replay
        usual, replay.pace, replay.clock = (replay.pace, replay.clock), crowd, time.thread_time
        replay.round({})
        before = replay.waited
        self.squeezed_totals.append(self._total(self.squeezed))
        self.squeezed_waits.append(replay.waited - before)
        replay.pace, replay.clock = usual

    def _total(self, times: Times) -> float:
        before = self.replay.worked
        self.replay.round(times)
        return self.replay.worked - before

    def result(self, room: bool = True) -> Result:
        """Return what was found; what memory computations take is looked for in a round of its own."""
        more = interruptions(self.times, self.totals)
        crowded = interruptions(self.squeezed, self.squeezed_totals) if self.squeezed else 0.0
        crowded *= 1.0 + share_of_waits(self.squeezed, self.squeezed_waits)
        self.replay.other_sums(self.times)
        shares = self.replay.weight_shares()
        found: Found = {}
        for (key, direction), values in self.times.items():
            timing = self._timing((key, direction), values, more, crowded)
            if direction != Direction.BACKWARD_INPUT or key not in shares:
                found.setdefault(key, {})[direction] = timing
                continue
            part = shares[key]
            for name, share in ((Direction.BACKWARD_INPUT, 1 - part), (Direction.BACKWARD_WEIGHT, part)):
                if share:
                    found.setdefault(key, {})[name.value] = timing.part(share)
        taken = self.replay.room() if room else {}
        return Result(found, self.replay.refused, taken, tuple(self.rounds))

    def _timing(self, what: tuple[str, str], values: Sequence[float], more: float, crowded: float) -> Timing:
        usual = statistics.median(values)
        alone, crowd = (
            statistics.median(times[what]) if what in times else 0.0 for times in (self.lonely, self.squeezed)
        )
        faster = usual / alone if usual and alone else 1.0
        slower = max(1.0, crowded * crowd / (more * usual)) if usual and crowd else 1.0
        return Timing(more * usual, spread(values), faster, slower if self.squeezed else 0.0)


def interruptions(times: Times, totals: Sequence[float]) -> float:
    """Return how much longer a round takes than its computations typically take on their own.

    Something interrupts a few of them in every round, others each time; the median of each one is free of
    it, and that of a step is not.
    """
    usual = sum(statistics.median(values) * len(values) for values in times.values()) / len(totals)
    return max(1.0, statistics.median(totals) / usual) if usual else 1.0


def share_of_waits(times: Times, waits: Sequence[float]) -> float:
    """Return what the waits of a round take of a core, in proportion to its computations."""
    if not waits:
        return 0.0
    usual = sum(statistics.median(values) * len(values) for values in times.values()) / len(waits)
    return max(0.0, statistics.median(waits) / usual) if usual else 0.0
