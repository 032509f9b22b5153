"""Search a large world: bound all plans at once, look closer at the promising ones, simulate the best."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardwise.graph import Graph
from shardwise.oracle.search.allowance import Allowance, Nearest
from shardwise.oracle.search.bounds import TIMINGS, Rows, rows_of
from shardwise.oracle.search.coarse import Coarse
from shardwise.oracle.search.kept import Kept, gigabytes
from shardwise.oracle.search.legal import Legality
from shardwise.oracle.search.space import Candidate, candidate, halos_of, shapes, splits, timings
from shardwise.oracle.search.stages import Outcome
from shardwise.oracle.search.tally import Tally
from shardwise.plan import Plan

Floats = NDArray[np.float64]
Needs = Floats | dict[int, float]
_PLACES, _SHAPE, _PLAN = range(3)


def legal_rows(
    graph: Graph,
    ranks: int,
    all_ranks: bool,
    tally: Tally,
    refuse: Callable[[Plan], str] | None = None,
    batch: int | None = None,
) -> list[Rows]:
    """List all plans for so many ranks; refuse what cannot be used wherever the network is cut.

    `batch` are the samples of the mini-batch, if they are not those of the graph.
    """
    legality, result = Legality(graph, batch), []
    for split in splits(ranks, max(0, len(legality.extents))):
        found = list(shapes(ranks, split, all_ranks))
        count = sum(len(timings(shape.stages)) for shape in found)
        if not count:
            continue
        reason = legality.of_split(split)
        for halo in halos_of(split):
            tally.enumerated += count
            if reason:
                tally.refuse(f"... {split} ...", reason, count)
                continue
            rows = rows_of(split, halo, found, legality.batch)
            bad = legality.of_rows(rows)
            _refuse(
                rows,
                np.flatnonzero(bad),
                lambda r, i: legality.of_sizes(int(r.stages[i]), int(r.data[i] * r.parts[i])),
                tally,
            )
            rows = rows.only(~bad)
            result.append(rows if refuse is None else _asked(rows, refuse, tally))
    return result


def _refuse(rows: Rows, places: NDArray[np.int_], why: Callable[[Rows, int], str], tally: Tally) -> None:
    """Refuse some of the plans, with reasons for the first of them."""
    for i, row in enumerate(places.tolist()):
        shape, timing = rows.shapes[rows.shape[row]], TIMINGS[int(rows.timing[row])]
        if not tally.refuse(candidate(rows.split, rows.halo, shape, timing), why(rows, row)):
            tally.refused += len(places) - i - 1
            break


def _asked(rows: Rows, refuse: Callable[[Plan], str], tally: Tally) -> Rows:
    """Ask about every single plan."""
    good = np.ones(len(rows), dtype=bool)
    for row in range(len(rows)):
        shape, timing = rows.shapes[rows.shape[row]], TIMINGS[int(rows.timing[row])]
        plan = candidate(rows.split, rows.halo, shape, timing).plan()
        reason = refuse(plan)
        if reason:
            tally.refuse(plan, reason)
            good[row] = False
    return rows.only(good)


class Worlds:
    """Find the best of many plans; the promising ones are bounded closer and closer, then simulated.

        PLACES     all plans of a family with the same stages, whose cuts are not known yet
        SHAPE      those of them with the same number of replicas: bounded by the slowest stage
        PLAN       one plan: bounded by what its stages, messages and sums of gradients cost

    Args:
        coarse: evaluates plans.
        kept: what is best so far, and by which measure.
        limit: what a rank may use.
        tally: counts what becomes of the plans.
    """

    def __init__(self, coarse: Coarse, kept: Kept, limit: Allowance, tally: Tally) -> None:
        self.coarse, self.kept, self.limit, self.tally = coarse, kept, limit, tally
        self.bounds: list[Floats] = []
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.found: list[tuple[Candidate, Outcome]] = []

    def run(self) -> list[tuple[Candidate, Outcome]]:
        """Look closer in the order of the bounds until none is better than what is kept."""
        for index in range(len(self.coarse.rows)):
            self._bound(index)
        heapq.heapify(self.heap)
        steps = (self._cut, self._price, self._simulate)
        while self.heap and self.heap[0][0] < self.kept.worst:
            _, level, index, first, last = heapq.heappop(self.heap)
            steps[level](index, first, last)
        return self.found

    def _push(self, level: int, index: int, first: int, last: int, bounds: Floats) -> None:
        least = float(bounds.min(initial=np.inf))
        if least < self.kept.worst:
            heapq.heappush(self.heap, (least, level, index, first, last))

    def _bound(self, index: int) -> None:
        """Bound all plans of a family, wherever the network is cut."""
        rows = self.coarse.rows[index]
        least = self.coarse.least_bytes(index)
        large = least > self.limit.of_each(ranks_of(rows))
        self._refuse(index, np.flatnonzero(large), least, "at least ")
        if large.all():
            self.bounds.append(np.full(len(rows), np.inf))
            return
        scores = self.kept.scores(self.coarse.seconds(index), least, ranks_of(rows))
        self.bounds.append(np.where(large, np.inf, scores))
        # Shapes that differ only in their replicas follow each other.
        alike = [(shape.count, shape.singles) for shape in rows.shapes]
        edges = [i for i in range(len(alike)) if not i or alike[i] != alike[i - 1]]
        places = np.searchsorted(rows.shape, [*edges, len(alike)]).tolist()
        for first, last in itertools.pairwise(places):
            self._push(_PLACES, index, first, last, self.bounds[index][first:last])

    def _cut(self, index: int, first: int, last: int) -> None:
        """Bound plans by their slowest stage."""
        rows = self.coarse.rows[index].only(slice(first, last))
        if self.kept.objective != "memory":
            seconds = self.coarse.at_cuts(index, rows)
            scores = self.kept.scores(seconds, seconds, ranks_of(rows))
            self.bounds[index][first:last] = np.maximum(self.bounds[index][first:last], scores)
        edges = np.flatnonzero(np.diff(rows.shape, prepend=-1, append=-1)) + first
        for start, stop in itertools.pairwise(edges.tolist()):
            self._push(_SHAPE, index, start, stop, self.bounds[index][start:stop])

    def _price(self, index: int, first: int, last: int) -> None:
        """Bound plans by all that is known without a simulation; refuse those that do not fit."""
        places = first + np.flatnonzero(self.bounds[index][first:last] < self.kept.worst)
        rows = self.coarse.rows[index]
        pipeline = self.coarse.pipeline(index, int(rows.shape[first]))
        peaks = pipeline.peaks(rows.timing[places], rows.samples[places])
        large = peaks > self.limit.of(pipeline.ranks)
        self._refuse(index, places[large], dict(zip(places.tolist(), peaks.tolist(), strict=True)), "")
        places, peaks = places[~large], peaks[~large]
        if not len(places):
            return
        seconds = pipeline.closer(rows.timing[places], rows.samples[places])
        scores = np.maximum(
            self.kept.scores(seconds, peaks, np.array(pipeline.ranks)), self.bounds[index][places]
        )
        for i, row in enumerate(places.tolist()):
            self._push(_PLAN, index, row, row + 1, scores[i : i + 1])

    def _simulate(self, index: int, row: int, _: int) -> None:
        outcome, plan = self.coarse.evaluate(index, row), self.coarse.candidate(index, row)
        self.tally.simulated += 1
        self.found.append((plan, outcome))
        self.kept.add(outcome.seconds, outcome.peak_bytes, plan.ranks)

    def nearest(self) -> Nearest | None:
        """Return the plan that needs least of what it has."""
        coarse = self.coarse
        shapes: list[tuple[float, int, int]] = []
        for index, rows in enumerate(coarse.rows):
            parts = coarse.least_bytes(index) / self.limit.of_each(ranks_of(rows))
            for shape in np.unique(rows.shape).tolist():
                shapes.append((float(parts[rows.shape == shape].min()), index, shape))
        best: Nearest | None = None
        for bound, index, shape in sorted(shapes):
            if best is not None and bound >= best.excess:
                break
            places = np.flatnonzero(coarse.rows[index].shape == shape)
            mine = coarse.rows[index].only(places)
            pipeline = coarse.pipeline(index, shape)
            peaks = pipeline.peaks(mine.timing, mine.samples)
            least, limit = int(peaks.argmin()), self.limit.of(pipeline.ranks)
            if best is None or peaks[least] / limit < best.excess:
                plan = coarse.candidate(index, int(places[least])).plan()
                best = Nearest(plan, float(peaks[least]), limit)
        return best

    def _refuse(self, index: int, places: NDArray[np.int_], needed: Needs, least: str) -> None:
        def why(_: Rows, row: int) -> str:
            limit = self.limit.of(self.coarse.candidate(index, row).ranks)
            return f"a rank needs {least}{gigabytes(needed[row], limit)}"

        _refuse(self.coarse.rows[index], places, why, self.tally)


def ranks_of(rows: Rows) -> Floats:
    """Return how many ranks each plan uses."""
    inside = np.array([s.data * (s.count * rows.split.width + s.singles) for s in rows.shapes])
    return inside[rows.shape].astype(np.float64)
