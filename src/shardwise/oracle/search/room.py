"""Does anything fit at all? Bytes need no prices, and the first plan that fits is enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from shardwise.graph import Graph
from shardwise.machine import Machine
from shardwise.oracle.kernels import Roofline
from shardwise.oracle.search.allowance import Allowance
from shardwise.oracle.search.classes import Sorter
from shardwise.oracle.search.coarse import Coarse
from shardwise.oracle.search.tally import Tally
from shardwise.oracle.search.worlds import legal_rows, ranks_of
from shardwise.plan import Plan, Split

Floats = NDArray[np.float64]
Family = tuple[Split, str]
"""Plans that split stages in one way: the split and how halos travel."""


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
        self.limit = Allowance(machine, memory)
        self.all_ranks, self.refuse = all_ranks, refuse
        self.sorter = Sorter(graph)

    def fits(self, ranks: int, batch: int) -> bool:
        """Tell whether any plan fits on so many ranks with a mini-batch of so many samples."""
        coarse = self._coarse(ranks, batch, frozenset())
        limit = self.limit.of(ranks)
        return any(self._peak(coarse, limit, *place) <= limit for _, *place in self._promising(coarse, limit))

    def least(self, ranks: int, batch: int, hopeless: Collection[Family] = ()) -> tuple[float, set[Family]]:
        """Return the bytes of the plan that needs least, and the families whose every plan is too large.

        Where nothing fits the bytes are those that no plan can go below. Of a plan that leaves ranks idle and
        so has more memory for each, they are counted as if it had no more than the others.

        Args:
            ranks, batch: for which the question is.
            hopeless: families that need not be looked at.
        """
        coarse = self._coarse(ranks, batch, hopeless)
        limit = self.limit.of(ranks)
        bounds: dict[Family, float] = {}
        for index, rows in enumerate(coarse.rows):
            key = (rows.split, rows.halo)
            bounds[key] = min(
                bounds.get(key, math.inf), float(self._least(coarse, limit, index).min(initial=math.inf))
            )
        best = math.inf
        for bound, *place in self._promising(coarse, limit):
            if bound >= best:
                break
            best = min(best, self._peak(coarse, limit, *place))
        if best == math.inf:
            best = max(min(bounds.values(), default=math.inf), math.nextafter(limit, math.inf))
        return best, {key for key, bound in bounds.items() if bound > limit}

    def _coarse(self, ranks: int, batch: int, hopeless: Collection[Family]) -> Coarse:
        rows = legal_rows(self.graph, ranks, self.all_ranks, Tally(), self.refuse, batch)
        rows = [found for found in rows if (found.split, found.halo) not in hopeless]
        return Coarse(
            self.graph,
            self.machine,
            Roofline(self.machine.device),
            rows,
            optimizer_slots=self.slots,
            sorter=self.sorter,
        )

    def _least(self, coarse: Coarse, limit: float, index: int) -> Floats:
        least: Floats = coarse.least_bytes(index) * (limit / self.limit.of_each(ranks_of(coarse.rows[index])))
        return least

    def _promising(self, coarse: Coarse, limit: float) -> list[tuple[float, int, int]]:
        """Return what could fit, in the order of what it needs at least: family and shape."""
        shapes: list[tuple[float, int, int]] = []
        for index, found in enumerate(coarse.rows):
            least = self._least(coarse, limit, index)
            for shape in np.unique(found.shape[least <= limit]).tolist():
                shapes.append((float(least[found.shape == shape].min()), index, shape))
        return sorted(shapes)

    def _peak(self, coarse: Coarse, limit: float, index: int, shape: int) -> float:
        """Return the bytes of that plan of a shape that needs least."""
        rows = coarse.rows[index]
        mine = rows.only(rows.shape == shape)
        pipeline = coarse.pipeline(index, shape)
        peaks = pipeline.peaks(mine.timing, mine.samples)
        return float(peaks.min()) * limit / self.limit.of(pipeline.ranks)
