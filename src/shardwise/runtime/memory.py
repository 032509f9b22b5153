"""Measure the peak of a step's memory: torch's allocator events, and the process's high-water mark.

The measured peak is the largest amount of memory that tensors held at one time during a step, above what
they held before it. It comes from the events of torch's own allocator, so it is exact and repeatable, and
does not depend on what other libraries or the operating system do.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Peak:
    """What one call needed beyond what was there before it."""

    bytes: int
    left_bytes: int
    high_water_bytes: int


def allocator_profile() -> torch.profiler.profile:
    """Return a profiler of the events of torch's allocator that says nothing on the user's screen.

    Its library reads how much to say when it is first used.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    return torch.profiler.profile(activities=activities, profile_memory=True)


class PeakWatch:
    """Watch what happens between `start` and `stop`."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self._before = 0
        self._profile: Any = None

    def start(self) -> None:
        """Begin."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
            self._before = torch.accelerator.memory_allocated(self.device)
            torch.accelerator.reset_peak_memory_stats(self.device)
            return
        self._profile = allocator_profile()
        self._profile.start()

    def stop(self, since_ns: int = 0) -> Peak:
        """End, and return what was needed meanwhile.

        Args:
            since_ns: what was allocated before this time (as of `time.time_ns`) counts as having been there,
                where the allocator's events tell.
        """
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
            peak = torch.accelerator.max_memory_allocated(self.device) - self._before
            left = torch.accelerator.memory_allocated(self.device) - self._before
            return Peak(peak, left, high_water_bytes())
        self._profile.stop()
        results = self._profile.profiler.kineto_results
        events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
        total = peak = 0
        for when, nbytes in sorted(events, key=lambda event: event[0]):
            if when >= since_ns:
                total += nbytes
                peak = max(peak, total)
        return Peak(peak, total, high_water_bytes())


def measure_peak(work: Callable[[], Any], device: torch.device | None = None) -> Peak:
    """Run `work` once, untimed, and return the peak of the memory that its tensors held."""
    # What was garbage before must not be given back meanwhile: it would hide as much of what is taken.
    gc.collect()
    watch = PeakWatch(device)
    watch.start()
    work()
    return watch.stop()


def measure_high_water(work: Callable[[], Any]) -> int:
    """Run `work` and return the most resident memory that this process had meanwhile.

    Where the system cannot forget an earlier maximum, it is the largest so far.
    """
    forget, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not forget.exists() or not status.exists():
        work()
        return high_water_bytes()
    forget.write_text("5")
    work()
    lines = [line.split() for line in status.read_text().splitlines()]
    return next((int(line[1]) * 1024 for line in lines if line[0] == "VmHWM:"), high_water_bytes())


def high_water_bytes() -> int:
    """Return the most resident memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
