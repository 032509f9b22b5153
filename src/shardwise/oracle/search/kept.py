"""What is best so far, by which measure."""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
OBJECTIVES = ("time", "memory", "cost")


class Kept:
    """Hold the scores of the best plans; lower is better.

    Args:
        objective: `time` (seconds), `memory` (bytes of the fullest rank) or `cost` (ranks x seconds).
        count: how many plans are wanted.
    """

    def __init__(self, objective: str, count: int) -> None:
        if objective not in OBJECTIVES:
            raise ValueError(f"objective: {objective!r} found; choose one of {', '.join(OBJECTIVES)}")
        self.objective, self.count = objective, count
        self._scores: list[float] = []

    @property
    def worst(self) -> float:
        """Return the score that a plan has to beat."""
        return self._scores[self.count - 1] if len(self._scores) >= self.count else float("inf")

    def score(self, seconds: float, peak_bytes: float, ranks: int) -> float:
        """Return how good a plan is."""
        return {"time": seconds, "memory": peak_bytes, "cost": ranks * seconds}[self.objective]

    def scores(self, seconds: Floats, peak_bytes: Floats, ranks: NDArray[np.float64]) -> Floats:
        """Return the same for many plans, or bounds of it for bounds of time and memory."""
        return {"time": seconds, "memory": peak_bytes, "cost": ranks * seconds}[self.objective]

    def add(self, seconds: float, peak_bytes: float, ranks: int) -> None:
        """Note the score of a plan that was simulated."""
        bisect.insort(self._scores, self.score(seconds, peak_bytes, ranks))


def gigabytes(needed: float, limit: float) -> str:
    """Say how much of how much."""
    return f"{needed / 1e9:.3g} GB of {limit / 1e9:.3g} GB"
