"""Search a small world: every plan that may be best is simulated event by event.

Each plan is bounded twice before that (`work`): by its computations alone, then by all its events.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from shardwise.oracle.predict import Oracle
from shardwise.oracle.search.bounds import TIMINGS, Rows
from shardwise.oracle.search.kept import Kept, gigabytes
from shardwise.oracle.search.space import candidate
from shardwise.oracle.search.tally import Tally
from shardwise.oracle.search.work import Kernels, busy_seconds
from shardwise.plan import Plan, PlanError
from shardwise.plan.check import check

# Lowered and priced stages of so many shapes are kept.
_MOST_ORACLES = 16
_KERNELS, _EVENTS = 0, 1


class Few:
    """Find the best of the plans for a few ranks.

    Args:
        oracle: of the network and the machine.
        batch: samples of the mini-batch.
        rows: the plans.
        kept: what is best so far, and by which measure.
        limit: bytes that a rank may use.
        tally: counts what becomes of the plans.
    """

    def __init__(
        self, oracle: Oracle, batch: int, rows: Sequence[Rows], kept: Kept, limit: float, tally: Tally
    ) -> None:
        self.oracle, self.batch, self.rows = oracle, batch, rows
        self.kept, self.limit, self.tally = kept, limit, tally
        self._oracles: OrderedDict[tuple[int, int], Oracle] = OrderedDict()

    def run(self) -> list[tuple[Plan, float, float]]:
        """Simulate in the order of the bounds until no bound is better than what is kept."""
        heap: list[tuple[float, int, int, Plan, tuple[int, int]]] = []
        for plan, shape, seconds in self._bounded():
            heap.append((self._score(seconds, plan), len(heap), _KERNELS, plan, shape))
        heapq.heapify(heap)
        found = []
        while heap:
            bound, number, level, plan, shape = heapq.heappop(heap)
            if bound >= self.kept.worst:
                break
            oracle = self._oracle_of(shape)
            if level == _KERNELS and self.kept.objective != "memory":
                closer = busy_seconds(oracle.walk(plan, self.batch), self._cores(plan))
                heapq.heappush(heap, (max(bound, self._score(closer, plan)), number, _EVENTS, plan, shape))
                continue
            seconds, peak = oracle.quick(plan, self.batch)
            if peak > self.limit:
                self.tally.refuse(plan, f"a rank needs {gigabytes(peak, self.limit)}")
                continue
            self.tally.simulated += 1
            self.kept.add(seconds, peak, plan.ranks)
            found.append((plan, seconds, peak))
        return found

    def _score(self, seconds: float, plan: Plan) -> float:
        return self.kept.score(seconds, 0.0, plan.ranks)

    def _bounded(self) -> list[tuple[Plan, tuple[int, int], float]]:
        """Return all plans that can be used with the seconds of their computations."""
        found = []
        for index, rows in enumerate(self.rows):
            plans: dict[int, list[Plan]] = {}
            kernels: dict[tuple[object, ...], Kernels] = {}
            for shape, timing in zip(rows.shape.tolist(), rows.timing.tolist(), strict=True):
                c = candidate(rows.split, rows.halo, rows.shapes[shape], TIMINGS[timing])
                plans.setdefault(shape, []).append(c.plan())
            for shape, alike in plans.items():
                try:
                    check(alike[0], self.oracle.at(self.batch), batch=self.batch)
                except PlanError as error:
                    for plan in alike:
                        self.tally.refuse(plan, str(error))
                    continue
                found += [(plan, (index, shape), s) for plan, s in self._computations(alike, kernels)]
        return found

    def _computations(
        self, plans: Sequence[Plan], kernels: dict[tuple[object, ...], Kernels]
    ) -> list[tuple[Plan, float]]:
        """Bound plans of one shape; of those that cut and split the network alike one is lowered.

        That is the first one, which has the largest micro-batches: where its ranks share samples those of
        the others may not, and then these computations are left out of the bound.
        """
        if self.kept.objective == "memory":
            return [(plan, 0.0) for plan in plans]
        oracle = self._new_oracle()
        result = []
        for plan in plans:
            step = oracle.lowered(plan, self.batch)
            # Replicas share statistics, and with them or other micro-batches the loss is a sum.
            key = (plan.stages, plan.data > 1, step.program.micro_batches * plan.data == 1)
            if key not in kernels:
                kernels[key] = Kernels(step, self.oracle.kernels)
            result.append((plan, kernels[key].least_seconds(step)))
        return result

    def _cores(self, plan: Plan) -> int:
        """Return the cores that all ranks share, if there are fewer of them."""
        machine = self.oracle.machine
        one_node = plan.ranks <= self.oracle.ranks_per_node(plan.ranks)
        shared = machine.device.host and one_node and plan.ranks > machine.node.cores
        return machine.node.cores if shared else 0

    def _oracle_of(self, shape: tuple[int, int]) -> Oracle:
        """Return an oracle of its own for each shape, so that what it remembers can be forgotten."""
        if shape not in self._oracles:
            self._oracles[shape] = self._new_oracle()
        self._oracles.move_to_end(shape)
        if len(self._oracles) > _MOST_ORACLES:
            self._oracles.popitem(last=False)
        return self._oracles[shape]

    def _new_oracle(self) -> Oracle:
        oracle = self.oracle
        return Oracle(
            oracle.at(self.batch), oracle.machine, oracle.kernels, optimizer_slots=oracle.optimizer_slots
        )
