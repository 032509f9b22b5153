"""How times are taken here: which clock, how often, and which of the values counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def clock() -> Callable[[], float]:
    """Return the clock for computations of this rank.

    The thread's own clock leaves out what unrelated processes take; a rank with several threads, or a
    device of its own, needs the clock on the wall.
    """
    single = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.thread_time if single else time.perf_counter


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
    now = clock()
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < most):
        start = now()
        run()
        times.append(now() - start)
    return typical(times)
