"""Evaluate plans from sums over layers, one rank for each group: bounds for all, a simulation for some.

A plan is a row of `Rows`; rows of one shape differ only in their timing and share a `Pipeline`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.graph import Graph
from shardwise.machine import Machine
from shardwise.oracle.kernels import KernelTimes
from shardwise.oracle.search.bounds import (
    TIMINGS,
    Rows,
    alive_in_front,
    crossing,
    least_at_cuts,
    least_bytes,
    least_seconds,
)
from shardwise.oracle.search.classes import Sorter
from shardwise.oracle.search.space import Candidate, candidate
from shardwise.oracle.search.stages import Outcome, Pipeline
from shardwise.oracle.search.tables import Family, Tables
from shardwise.plan import Split, Way
from shardwise.plan.cutting import choose_cuts, crossing_bytes, earliest_cut
from shardwise.program.assign import UNSHARED

Floats = NDArray[np.float64]
_WHOLE = Split()
_MOST_PIPELINES = 16


class Coarse:
    """Evaluate plans for one network, machine and mini-batch.

    Args:
        graph, machine, kernels: what runs on what.
        rows: all plans that will be asked for; their `samples` and `data` are priced together.
        optimizer_slots: copies of the parameters that the optimizer keeps.
        sorter: of the same network, if there is one already.
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        kernels: KernelTimes,
        rows: Iterable[Rows],
        *,
        optimizer_slots: float = 1.0,
        sorter: Sorter | None = None,
    ) -> None:
        self.graph, self.machine, self.slots = graph, machine, optimizer_slots
        self.rows = [part for found in rows for part in _by_tail(found) if len(part)]
        self.tables = Tables(sorter or Sorter(graph), machine, kernels)
        self.crossing = np.array(crossing_bytes(graph), dtype=np.float64) / graph.batch
        samples = {n for found in self.rows for n in np.unique(found.samples).tolist()}
        replicas = {n for found in self.rows for n in np.unique(found.data).tolist()}
        self.whole = Family(self.tables, _WHOLE, "layer", sorted(samples), sorted(replicas))
        self.families = [self._family(found) for found in self.rows]
        self._cuts: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._earliest: dict[tuple[int, int, int], int] = {}
        self._pipelines: OrderedDict[tuple[int, int], Pipeline] = OrderedDict()

    def _family(self, rows: Rows) -> Family:
        if rows.split == _WHOLE:
            return self.whole
        samples, replicas = np.unique(rows.samples).tolist(), np.unique(rows.data).tolist()
        tail = UNSHARED if _lacks_samples(rows) else "auto"
        return Family(self.tables, rows.split, rows.halo, samples, replicas, tail)

    def seconds(self, index: int) -> Floats:
        """Return seconds that the plans of one family cannot beat, wherever the network is cut."""
        rows, family = self.rows[index], self.families[index]
        at, replicas = lookup(family.samples, rows.samples), lookup(family.replicas, rows.data)
        total, weight, statistics = family.totals
        seconds = total[at] + statistics[replicas]
        # No stage is faster than the slowest layer.
        layer = (family.forward + family.backward).max(axis=1)
        slowest = np.maximum(seconds / rows.stages, layer[at])
        result = least_seconds(rows, seconds, weight[at], slowest)
        tiled_first = np.flatnonzero(rows.singles)
        if len(tiled_first):
            result[tiled_first] = self._tiled_first(family, rows.only(rows.singles > 0))
        return result

    def _tiled_first(self, family: Family, rows: Rows) -> Floats:
        """Return the same where only the first stages are split: for the best place where they end."""
        whole, all_rows = self.whole, rows
        distinct, back = _distinct(rows.samples, rows.data, rows.stages, rows.singles)
        rows = rows.only(distinct)
        at, replicas = lookup(family.samples, rows.samples), lookup(family.replicas, rows.data)
        behind, others = lookup(whole.samples, rows.samples), lookup(whole.replicas, rows.data)
        mine = family.sums
        front, (rest, lighter_rest) = mine.forward + mine.backward, self._rest
        shared, apart = family.running_statistics, self.whole.running_statistics

        def first(place: NDArray[np.int_]) -> Floats:
            each: Floats = (front[at, place] + shared[replicas, place]) / count
            return each

        def second(place: NDArray[np.int_]) -> Floats:
            left = rest[behind, -1] - rest[behind, place] + apart[others, -1] - apart[others, place]
            each: Floats = left / rows.singles
            return each

        count = rows.stages - rows.singles
        starts = self._starts(family.split.width, rows.singles, count)
        slowest = crossing(first, second, starts, len(self.graph.layers))[back]
        whole_rows = [self.whole.samples[n] for n in family.samples]
        total = _either(front, rest[whole_rows])
        lighter = _either(front - mine.weight, lighter_rest[whole_rows])
        at = at[back]
        return least_seconds(all_rows, total[at], (total - lighter)[at], slowest)

    def least_bytes(self, index: int) -> Floats:
        """Return bytes that the fullest rank cannot go below, wherever the network is cut."""
        rows, family = self.rows[index], self.families[index]
        saved, weights, trained = (column.sum() for column in family.bytes_each)
        least = least_bytes(rows, rows.samples * saved, weights + (1 + self.slots) * trained)
        tiled_first = np.flatnonzero(rows.singles)
        if len(tiled_first):
            least[tiled_first] = self._tiled_first_bytes(family, rows.only(rows.singles > 0))
        largest = np.where(rows.singles > 0, min(family.largest, self.whole.largest), family.largest)
        return least + 3 * rows.samples * largest + self.machine.device.baseline_bytes

    def _tiled_first_bytes(self, family: Family, rows: Rows) -> Floats:
        mine, theirs = family.sums, self.whole.sums
        alive, there, behind = alive_in_front(rows)
        count = rows.stages - rows.singles
        distinct, back = _distinct(rows.samples, alive, there, behind, rows.singles, count)
        alive, there, behind = alive[distinct], there[distinct], behind[distinct]
        starts = self._starts(family.split.width, rows.singles[distinct], count[distinct])
        samples = rows.samples[distinct]
        front = mine.weights + (1 + self.slots) * mine.trained
        rest = theirs.weights + (1 + self.slots) * theirs.trained

        def first(place: NDArray[np.int_]) -> Floats:
            here: Floats = (samples * mine.saved[place] + front[place] / alive) / there
            return here

        def second(place: NDArray[np.int_]) -> Floats:
            saved, state = theirs.saved[-1] - theirs.saved[place], rest[-1] - rest[place]
            each: Floats = (samples * saved + state / alive) / behind
            return each

        return crossing(first, second, starts, len(self.graph.layers))[back]

    @cached_property
    def _rest(self) -> tuple[Floats, Floats]:
        """Return running sums of layers that are not split: all seconds, and those that are waited for."""
        sums = self.whole.sums
        both = sums.forward + sums.backward
        return both, both - sums.weight

    def _starts(self, width: int, singles: NDArray[np.int_], counts: NDArray[np.int_]) -> NDArray[np.int_]:
        """Return for numbers of single-rank and of tiled stages how far the latter reach at least."""
        pairs, where = np.unique(np.stack((singles, counts)), axis=1, return_inverse=True)
        found = []
        for single, count in pairs.T.tolist():
            key = (width, single, count)
            if key not in self._earliest:
                self._earliest[key] = earliest_cut(self.graph, width, single, count)
            found.append(self._earliest[key])
        return np.array(found)[where.reshape(-1)]

    def at_cuts(self, index: int, rows: Rows) -> Floats:
        """Return seconds that plans with the same stages cannot beat where the runtime cuts them.

        As in `bounds`, with what each stage takes; messages and sums of gradients are left out.
        """
        what, family = rows.shapes[int(rows.shape[0])], self.families[index]
        bounds = self._bounds(index, int(rows.shape[0]))
        both, weight = _at(family, bounds, rows)
        if what.singles:
            rest, lighter = _at(self.whole, bounds, rows)
            both[:, what.count :], weight[:, what.count :] = rest[:, what.count :], lighter[:, what.count :]
        return least_at_cuts(rows, both, weight)

    def _bounds(self, index: int, shape: int) -> NDArray[np.int_]:
        cuts = self.cuts(self.candidate(index, int(np.searchsorted(self.rows[index].shape, shape))))
        return np.array([0, *cuts, len(self.graph.layers)])

    def pipeline(self, index: int, shape: int) -> Pipeline:
        """Return one shape of a family; those that were asked for last are kept."""
        key = (index, shape)
        if key not in self._pipelines:
            rows = self.rows[index]
            what = rows.shapes[shape]
            bounds = self._bounds(index, shape)
            self._pipelines[key] = Pipeline(
                self.families[index], self.whole, what, bounds, self.crossing, self.slots
            )
        self._pipelines.move_to_end(key)
        if len(self._pipelines) > _MOST_PIPELINES:
            self._pipelines.popitem(last=False)
        return self._pipelines[key]

    def cuts(self, c: Candidate) -> tuple[int, ...]:
        """Return where the runtime would cut."""
        key = (c.split.width, c.count, c.singles)
        if key not in self._cuts:
            self._cuts[key] = choose_cuts(self.graph, c.plan()) if c.stages > 1 else ()
        return self._cuts[key]

    def candidate(self, index: int, row: int) -> Candidate:
        """Return the plan of a row."""
        rows = self.rows[index]
        return candidate(rows.split, rows.halo, rows.shapes[rows.shape[row]], TIMINGS[int(rows.timing[row])])

    def evaluate(self, index: int, row: int) -> Outcome:
        """Return time and memory of the plan of a row."""
        rows = self.rows[index]
        pipeline = self.pipeline(index, int(rows.shape[row]))
        return pipeline.evaluate(int(rows.timing[row]), int(rows.samples[row]))


def _by_tail(rows: Rows) -> tuple[Rows, ...]:
    """Part plans whose ranks can share the samples behind the last tile from those that cannot.

    `tail=auto` decides by that where tiles end, so that their layers are not of the same classes.
    """
    if rows.split.way is not Way.SPATIAL:
        return (rows,)
    few = rows.samples < rows.split.width
    return rows.only(~few), rows.only(few)


def _lacks_samples(rows: Rows) -> bool:
    """Tell whether micro-batches have too few samples for the ranks that share a tiled stage."""
    return rows.split.way is Way.SPATIAL and int(rows.samples[0]) < rows.split.width


def _at(family: Family, bounds: NDArray[np.int_], rows: Rows) -> tuple[Floats, Floats]:
    """Return the seconds of the stages of every plan: all of them, and those for weights."""
    at, replicas = lookup(family.samples, rows.samples), lookup(family.replicas, rows.data)
    sums = family.sums
    both = np.diff(sums.forward[:, bounds] + sums.backward[:, bounds])
    statistics = np.diff(family.running_statistics[:, bounds])
    return both[at] + statistics[replicas], np.diff(sums.weight[:, bounds])[at]


def _either(front: Floats, rest: Floats) -> Floats:
    """Return the least sum of what is in front of a place and what is behind it, for each row."""
    least: Floats = (front + rest[:, -1:] - rest).min(axis=1)
    return least


def _distinct(*columns: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return one row of each kind, and for every row the place of its kind among them."""
    keys = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        _, numbers = np.unique(column, return_inverse=True)
        keys = keys * (int(numbers.max(initial=0)) + 1) + numbers
    _, first, back = np.unique(keys, return_index=True, return_inverse=True)
    return first, back


def lookup(numbers: dict[int, int], values: NDArray[np.int_]) -> NDArray[np.intp]:
    """Return the place of each value among rising numbers."""
    return np.searchsorted(np.array(list(numbers)), values)
