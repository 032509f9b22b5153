"""Add small tensors up on a table: memory that all ranks of a group on one node can see.

    every rank:   lay its part down | say so | wait until all did | add all parts, in the order of ranks

There is one round, and nobody has to be awake for another rank to go on; a sum by messages takes several
rounds, and in each of them whoever sleeps holds up the others. So it pays where ranks share cores; with a
core for each of them messages are faster. The order of ranks makes the sum the same to the last bit
everywhere. The table has two sides that take turns: who says that it came for the next sum has read the last.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.mpi.shared import share_memory
from shardwise.runtime.poller import Poller

# Statistics of a batch norm with 2,048 channels; larger sums are better off in rounds, each with a part.
PART_BYTES = 64 << 10
MOST_RANKS = 16
_DTYPES = (torch.float64, torch.float32, torch.int64)
# Each rank counts on a cache line of its own.
_LINE_BYTES = 64


class Table:
    """This rank's place at the table of a group."""

    def __init__(
        self, rank: int, size: int, memory: mmap.mmap, others: Sequence[int], poller: Poller
    ) -> None:
        self._poller, self._others, self._rank = poller, tuple(others), rank
        self._counts = memoryview(memory)[: size * _LINE_BYTES].cast("q")[:: _LINE_BYTES // 8]
        start, count = size * _LINE_BYTES, 2 * size * PART_BYTES
        parts = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=count)
        self._parts = parts.view(2, size, PART_BYTES)
        self._views: dict[tuple[torch.dtype, int], list[tuple[Tensor, Tensor]]] = {}
        self._count = 0
        self._fence = threading.Lock()
        self.free = True

    def lay(self, tensor: Tensor) -> None:
        """Lay this rank's part down and tell who sleeps if it was the last one."""
        self.free = False
        self._count += 1
        mine, _ = self._view(tensor)
        mine.copy_(tensor.reshape(-1))
        with self._fence:  # what was laid down is seen before the count
            self._counts[self._rank] = self._count
        with self._fence:  # and the count before those of others are looked at
            complete = self.Test()
        if complete:
            self._poller.ring(self._others)

    def Test(self) -> bool:
        """Tell whether all ranks have laid their parts down."""
        return min(self._counts) >= self._count

    def add(self, tensor: Tensor) -> None:
        """Put the sum of all parts into the tensor."""
        tensor.copy_(torch.sum(self._view(tensor)[1], 0).view(tensor.shape))
        self.free = True

    def _view(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's part and those of all, on the side whose turn it is."""
        key = (tensor.dtype, tensor.numel())
        views = self._views.get(key)
        if views is None:
            sides = [side[:, : tensor.nbytes].view(tensor.dtype) for side in self._parts]
            views = self._views[key] = [(side[self._rank], side) for side in sides]
        return views[self._count % 2]


def fits(tensor: Tensor) -> bool:
    """Tell whether a tensor is small and plain enough for a table.

    Only by what is the same on all ranks: how each of them keeps it in memory is not.
    """
    return tensor.is_cpu and tensor.dtype in _DTYPES and 0 < tensor.nbytes <= PART_BYTES


def lay_table(comm: Any, ranks: Sequence[int], me: int, poller: Poller) -> Table | None:
    """Return this rank's place, or None if the ranks share no memory; collective over the communicator."""
    size = comm.Get_size()
    if size > MOST_RANKS:
        return None
    nbytes = size * _LINE_BYTES + 2 * size * PART_BYTES
    memory = share_memory(comm, nbytes, ranks, me, poller, "a table for small sums")
    others = [r for r in ranks if r != me]
    return None if memory is None else Table(comm.Get_rank(), size, memory, others, poller)
