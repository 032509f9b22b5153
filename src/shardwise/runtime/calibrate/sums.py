"""Time sums of gradients in turn with computations: how fast memory is changes within seconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.oracle.moves import Move, reduction_of
from shardwise.runtime.calibrate.operations import sums_in_turn
from shardwise.runtime.poller import cores
from shardwise.runtime.session import current
from shardwise.runtime.wire import wire_of

# Smaller sums are mostly software, which is calibrated.
SIZES = (2 << 20, 16 << 20)


class Sums:
    """The sums of the first ranks of a job on one node; the others take no part."""

    def __init__(self, members: int) -> None:
        """Lay a wire between the first ranks; every rank of the job must call."""
        self.runs: dict[Move, Callable[[], float | None]] = {}
        self.times: dict[Move, list[float]] = {}
        if not dist.is_initialized() or members < 2:
            return
        size, place, ranks = dist.get_world_size(), current().place, range(members)
        # Every rank must be there when a group is made; that of gradients carries nothing else.
        group = dist.new_group(list(ranks))
        if place.local_size == size and dist.get_rank() in ranks:
            self.wire = wire = wire_of(group, ranks)
            wire.prepare_sums()
            transport = dist.get_backend(group)
            for nbytes in SIZES:
                move = reduction_of(transport, members, nbytes)
                self.runs[move], self.times[move] = sums_in_turn(wire, nbytes), []
            self.visit()
            for times in self.times.values():
                times.clear()

    def visit(self) -> None:
        """Time a few sums of every size, each size after a meeting of all that take part."""
        for move, run in self.runs.items():
            self.wire.all_reduce(torch.zeros(1, device=current().device))
            self.times[move].append(run() or 0.0)

    def seconds(self) -> dict[Move, float]:
        """Return the typical time of one of many sums of every size."""
        return {move: statistics.median(times) for move, times in self.times.items() if times}


def shared_by(size: int) -> int:
    """Return how many of the ranks of a node add up: as many as were calibrated with and without cores."""
    return min(size, cores() if size <= cores() else 2 * cores())
