"""Time chains in turn with something else, so that both meet the same moods of the machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from shardwise.runtime.calibrate.chains import Chain
from shardwise.runtime.calibrate.overheads import call_overhead
from shardwise.runtime.calibrate.pace import Pace
from shardwise.runtime.calibrate.timer import Result, Timer
from shardwise.runtime.poller import cores


class Turns:
    """The timers of a rank that has a core; the others wait."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self.size = min(dist.get_world_size(), cores())
        self.works = dist.get_rank() < self.size
        pace = Pace(self.size) if chains else None
        overhead = call_overhead()
        self.timers = [Timer(chain, overhead, pace) for chain in chains] if pace and self.works else []
        dist.barrier()

    def turn(self) -> None:
        """Go through every chain once."""
        dist.barrier()
        for timer in self.timers:
            timer.round()
        dist.barrier()

    def results(self) -> list[Result] | None:
        """Return what was found; None on a rank that waited."""
        return [timer.result(room=False) for timer in self.timers] if self.works else None
