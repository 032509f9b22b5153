"""Let ranks that run the same chain meet where the program does, as cheaply as memory allows.

Ranks that meet do the same at the same time: all of them wait for the memory, then all of them multiply. And
they wait for the slowest at every meeting. Both belong to what is measured; a message would cost too much.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardwise.runtime.calibrate.clock import now
from shardwise.runtime.environment import ALONE
from shardwise.runtime.poller import cores
from shardwise.runtime.session import current
from shardwise.runtime.wire import wire_of

# Counters lie on cache lines of their own.
_LINE = 8
_SPIN_SECONDS = 1e-4
_MEETINGS = 50


class Pace:
    """The counters of all ranks of this node; without a core for each of them who waits gives way at once."""

    def __init__(self, among: int | None = None) -> None:
        """Share counters among the first ranks, by default all of them; every rank of the job must call."""
        place = current().place if dist.is_initialized() else ALONE
        self.rank, self.size, self.count = place.rank, among or place.size, 0
        self.spin_seconds = _SPIN_SECONDS if self.size <= cores() else 0.0
        alike = self.size > 1 and place.size == place.local_size
        counters = self._shared() if alike else None
        # Who is not among them does not wait.
        self.counters = counters if self.rank < self.size else None

    def _shared(self) -> NDArray[np.int64]:
        """Map one file into all ranks; its name is gone before anybody goes on."""
        held = [""]
        if self.rank == 0:
            handle, held[0] = tempfile.mkstemp(prefix="shardwise-pace-")
            os.truncate(handle, 8 * _LINE * self.size)
            os.close(handle)
        dist.broadcast_object_list(held, src=0)
        counters = np.memmap(held[0], dtype=np.int64, mode="r+", shape=(_LINE * self.size,))
        dist.barrier()
        if self.rank == 0:
            Path(held[0]).unlink()
        return counters

    def meet(self) -> float:
        """Wait until all ranks are here; return for how long."""
        counters = self.counters
        if counters is None:
            return 0.0
        start = now()
        self.count += 1
        counters[_LINE * self.rank] = self.count
        for other in range(self.size):
            while counters[_LINE * other] < self.count:
                if now() - start > self.spin_seconds:
                    os.sched_yield()
        return now() - start


class Crowd:
    """All ranks of a job that are more than its cores: they meet as training does, and waits cost a core."""

    def __init__(self) -> None:
        """Lay a wire between all ranks; every rank of the job must call."""
        self.wire = wire_of(dist.group.WORLD, range(dist.get_world_size()))
        self.value = torch.zeros(16, dtype=torch.float64)
        self.own_seconds = 0.0
        for _ in range(_MEETINGS):
            self.meet()
        self.own_seconds = statistics.median(self.meet() for _ in range(_MEETINGS))

    def meet(self) -> float:
        """Wait until all ranks are here; return the seconds on a core that waiting took.

        The meeting itself is priced as a message.
        """
        start = time.thread_time()
        self.wire.all_reduce(self.value)
        return time.thread_time() - start - self.own_seconds
