"""Time chains in turn with something else, so that both meet the same moods of the machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.program import Regrid
from shardwise.runtime.calibrate.chains import Chain
from shardwise.runtime.calibrate.kernels import agreed, in_turn, visit
from shardwise.runtime.calibrate.overheads import call_overhead
from shardwise.runtime.calibrate.pace import Pace
from shardwise.runtime.calibrate.sums import Sums, shared_by
from shardwise.runtime.calibrate.timer import Findings, Timer
from shardwise.runtime.calibrate.values import Weights
from shardwise.runtime.order import order_of
from shardwise.runtime.poller import cores
from shardwise.runtime.wire import wire_of


class Turns:
    """The timers of a rank that has a core; the others wait."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self.size = min(dist.get_world_size(), cores())
        self.works = dist.get_rank() < self.size
        self.pace = pace = Pace(self.size) if chains else None
        overhead = call_overhead()
        layers = [op.layer for chain in chains for op in chain.ops if not isinstance(op, Regrid)]
        order = order_of("auto", layers, torch.device("cpu"), dist.get_rank(), agreed)
        weights = Weights()
        timers = [Timer(c, overhead, pace, order, weights) for c in chains] if pace and self.works else []
        self.timers, self.visited = timers, in_turn(timers, dist.get_rank())
        self.sums = Sums(shared_by(dist.get_world_size()))
        # As steps wait: who has no core must not take one from those that compute.
        self.wire = wire_of(dist.group.WORLD, range(dist.get_world_size()))
        self._meet()

    def turn(self) -> None:
        """Go through every chain once."""
        self._meet()
        if self.pace is not None and self.works:
            visit(self.visited, self.pace)
        self._meet()
        self.sums.visit()

    def _meet(self) -> None:
        self.wire.all_reduce(torch.zeros(1))

    def results(self) -> Findings | None:
        """Return what was found; None on a rank that waited."""
        if not self.works:
            return None
        return Findings([timer.result(room=False) for timer in self.timers], self.sums.seconds())
