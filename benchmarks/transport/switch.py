"""Measure a context switch: two processes on one core that pass a byte through pipes."""

from __future__ import annotations

import os
import time

_ROUNDS = 2000


def context_switch_seconds() -> float:
    """Return the median seconds of one hand-over, pipe calls included."""
    there, back = os.pipe(), os.pipe()
    core = {min(os.sched_getaffinity(0))}
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, core)
        for _ in range(_ROUNDS):
            os.read(there[0], 1)
            os.write(back[1], b"x")
        os._exit(0)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, core)
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        os.write(there[1], b"x")
        os.read(back[0], 1)
        times.append((time.perf_counter() - start) / 2)
    os.sched_setaffinity(0, before)
    os.waitpid(child, 0)
    return sorted(times)[_ROUNDS // 2]
