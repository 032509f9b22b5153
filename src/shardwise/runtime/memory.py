"""Measure the peak of a step's memory: torch's allocator events, and the process's high-water mark.

The measured peak is the largest amount of memory that tensors held at one time during a step, above what
they held before it. It comes from the events of torch's own allocator, so it is exact and repeatable, and
does not depend on what other libraries or the operating system do.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Peak:
    """What one call needed beyond what was there before it."""

    bytes: int
    left_bytes: int
    high_water_bytes: int


def measure_peak(work: Callable[[], Any], device: torch.device | None = None) -> Peak:
    """Run `work` once, untimed, and return the peak of the memory that its tensors held."""
    where = device or torch.device("cpu")
    if where.type != "cpu":
        torch.accelerator.synchronize(where)
        before = torch.accelerator.memory_allocated(where)
        torch.accelerator.reset_peak_memory_stats(where)
        work()
        torch.accelerator.synchronize(where)
        peak = torch.accelerator.max_memory_allocated(where) - before
        left = torch.accelerator.memory_allocated(where) - before
        return Peak(peak, left, high_water_bytes())
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    results = profile.profiler.kineto_results
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    total = peak = 0
    for _, nbytes in sorted(events, key=lambda event: event[0]):
        total += nbytes
        peak = max(peak, total)
    return Peak(peak, total, high_water_bytes())


def high_water_bytes() -> int:
    """Return the most resident memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
