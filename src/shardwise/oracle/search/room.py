"""Does anything fit at all? Bytes need no prices, and the first plan that fits is enough."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardwise.graph import Graph
from shardwise.machine import Machine
from shardwise.oracle.kernels import Roofline
from shardwise.oracle.search.classes import Sorter
from shardwise.oracle.search.coarse import Coarse
from shardwise.oracle.search.tally import Tally
from shardwise.oracle.search.worlds import legal_rows
from shardwise.plan import Plan


class Room:
    """Tell whether a network fits, for many numbers of ranks and samples: its layers are sorted only once.

    Args:
        graph, machine: what would run on what.
        memory: bytes that a rank may use; default: what the device has.
        optimizer_slots: copies of the parameters that the optimizer keeps.
        all_ranks: only plans that use all ranks.
        refuse: says why a plan must not be used, or nothing.
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        *,
        memory: float | None = None,
        optimizer_slots: float = 1.0,
        all_ranks: bool = False,
        refuse: Callable[[Plan], str] | None = None,
    ) -> None:
        self.graph, self.machine, self.slots = graph, machine, optimizer_slots
        self.limit = memory or machine.device.memory_bytes
        self.all_ranks, self.refuse = all_ranks, refuse
        self.sorter = Sorter(graph)

    def fits(self, ranks: int, batch: int) -> bool:
        """Tell whether any plan fits on so many ranks with a mini-batch of so many samples."""
        rows = legal_rows(self.graph, ranks, self.all_ranks, Tally(), self.refuse, batch)
        coarse = Coarse(
            self.graph,
            self.machine,
            Roofline(self.machine.device),
            rows,
            optimizer_slots=self.slots,
            sorter=self.sorter,
        )
        shapes: list[tuple[float, int, int]] = []
        for index, found in enumerate(coarse.rows):
            least = coarse.least_bytes(index)
            for shape in np.unique(found.shape[least <= self.limit]).tolist():
                shapes.append((float(least[found.shape == shape].min()), index, shape))
        return any(self._fits(coarse, index, shape) for _, index, shape in sorted(shapes))

    def _fits(self, coarse: Coarse, index: int, shape: int) -> bool:
        rows = coarse.rows[index]
        mine = rows.only(rows.shape == shape)
        peaks = coarse.pipeline(index, shape).peaks(mine.timing, mine.samples)
        return bool(peaks.min() <= self.limit)
