"""How times are taken here: which clock, how often, and which of the values counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

# The clock on the wall, as for steps: what interrupts a step interrupts its kernels too.
now = time.perf_counter


def typical(values: Sequence[float]) -> float:
    """Return the median: a step is made of ordinary moments, not of the best ones."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Return half of the range that holds the middle half of the values."""
    if len(values) < 4:
        return max(values) - min(values)
    quarters = statistics.quantiles(values, n=4)
    return (quarters[2] - quarters[0]) / 2


def repeat(run: Callable[[], Any], seconds: float, most: int = 500) -> float:
    """Repeat a computation for some time, at least three times after a first try; return its typical time."""
    run()
    times: list[float] = []
    end = now() + seconds
    while len(times) < 3 or (now() < end and len(times) < most):
        start = now()
        run()
        times.append(now() - start)
    return typical(times)
