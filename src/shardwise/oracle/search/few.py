"""Search a small world: every plan that may be best is simulated event by event.

Each plan is bounded twice before that (`relaxed`): by what its busiest rank works, and, unless that is enough
to drop it, by a step that waits for less. What a quicker search holds for the best plans is simulated first,
so that the bounds have something to be compared with.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from shardwise.oracle.kernels import Roofline
from shardwise.oracle.predict import Oracle
from shardwise.oracle.profile import Profile
from shardwise.oracle.search.allowance import Allowance, Nearest
from shardwise.oracle.search.bounds import TIMINGS, Rows
from shardwise.oracle.search.holding import Holdings, least_bytes
from shardwise.oracle.search.kept import Kept, gigabytes
from shardwise.oracle.search.relaxed import Relaxed
from shardwise.oracle.search.space import candidate
from shardwise.oracle.search.tally import Tally
from shardwise.oracle.search.work import Passes
from shardwise.plan import Plan, PlanError, Way
from shardwise.plan.check import check
from shardwise.plan.micro_batches import samples_of
from shardwise.program.lowered import lower

# Lowered and priced stages of so many shapes are kept.
_MOST_ORACLES = 16
Found = tuple[Plan, float, float]
Progress = Callable[[int, int], None]


class Few:
    """Find the best of the plans for a few ranks.

    Args:
        oracle: of the network and the machine.
        batch: samples of the mini-batch.
        rows: the plans.
        kept: what is best so far, and by which measure.
        limit: what a rank may use.
        tally: counts what becomes of the plans.
        first: some of the plans that are likely to be good.
        progress: is told how many of how many plans are done with.
    """

    def __init__(
        self,
        oracle: Oracle,
        batch: int,
        rows: Sequence[Rows],
        kept: Kept,
        limit: Allowance,
        tally: Tally,
        first: Sequence[Plan] = (),
        progress: Progress | None = None,
    ) -> None:
        self.oracle, self.batch, self.rows = oracle, batch, rows
        self.kept, self.limit, self.tally = kept, limit, tally
        self.first, self.progress = first, progress or (lambda done, total: None)
        self.gain = _gain(oracle)
        self._oracles: OrderedDict[object, Oracle] = OrderedDict()
        self.found: list[Found] = []
        self._nearest: Nearest | None = None
        self.too_large: list[tuple[float, int, Plan]] = []

    def run(self) -> list[Found]:
        """Simulate in the order of the bounds until no bound is better than what is kept."""
        for plan in self.first:
            self._simulate(plan)
        done, total = set(self.first), sum(len(rows) for rows in self.rows)
        bounded: list[tuple[float, int, Plan]] = []
        for number, (bound, plan) in enumerate(self._bounded()):
            self.progress(number, total)
            if plan not in done and bound < self.kept.worst:
                bounded.append((bound, number, plan))
        for bound, _, plan in sorted(bounded, key=lambda entry: entry[:2]):
            if bound >= self.kept.worst:
                break
            self._simulate(plan)
        self.progress(total, total)
        return self.found

    def _simulate(self, plan: Plan) -> None:
        seconds, peak = self._oracle_of(plan).quick(plan, self.batch)
        limit = self.limit.of(plan.ranks)
        if peak > limit:
            self._refuse(plan, peak)
            self._compare(Nearest(plan, peak, limit))
            return
        self.tally.simulated += 1
        self.kept.add(seconds, peak, plan.ranks)
        self.found.append((plan, seconds, peak))

    def _score(self, seconds: float, nbytes: float, plan: Plan) -> float:
        return self.kept.score(seconds, nbytes, plan.ranks)

    def _refuse(self, plan: Plan, needed: float, least: str = "") -> None:
        limit = self.limit.of(plan.ranks)
        self.tally.refuse(plan, f"a rank needs {least}{gigabytes(needed, limit)}")

    def _compare(self, found: Nearest) -> Nearest:
        if self._nearest is None or found.excess < self._nearest.excess:
            self._nearest = found
        return self._nearest

    def nearest(self) -> Nearest | None:
        """Return the plan that needs least of what it has, where none fits."""
        for bound, _, plan in sorted(self.too_large, key=lambda entry: entry[:2]):
            if self._nearest is not None and bound >= self._nearest.excess:
                break
            peak = self._oracle_of(plan).quick(plan, self.batch)[1]
            self._compare(Nearest(plan, peak, self.limit.of(plan.ranks)))
        return self._nearest

    def _bounded(self) -> Iterator[tuple[float, Plan]]:
        """Yield all plans that can be used, with a score that each cannot beat."""
        for rows in self.rows:
            plans: dict[int, list[Plan]] = {}
            for shape, timing in zip(rows.shape.tolist(), rows.timing.tolist(), strict=True):
                c = candidate(rows.split, rows.halo, rows.shapes[shape], TIMINGS[timing])
                plans.setdefault(shape, []).append(c.plan())
            alike: dict[tuple[object, ...], list[Plan]] = {}
            for found in plans.values():
                try:
                    check(found[0], self.oracle.at(self.batch), batch=self.batch)
                except PlanError as error:
                    for plan in found:
                        self.tally.refuse(plan, str(error))
                    continue
                for plan in found:
                    alike.setdefault(self._key(plan), []).append(plan)
            for found in alike.values():
                yield from self._scores(found)

    def _key(self, plan: Plan) -> tuple[object, ...]:
        """Return what plans share whose lowered stages differ only in the number of samples.

        Replicas share statistics. Where tiles end depends on whether ranks can share samples; up to there
        tiles are the same, unless the halos of several layers are fetched together.
        """
        fused = plan.halo != "layer" and plan.stages[0].way is Way.SPATIAL
        return (plan.stages, plan.data > 1, fused and self._samples(plan) < plan.stages[0].width)

    def _samples(self, plan: Plan) -> int:
        lo, hi = samples_of(plan, self.batch, 0, 0)
        return hi - lo

    def _scores(self, plans: Sequence[Plan]) -> Iterator[tuple[float, Plan]]:
        """Bound plans that cut and split the network alike: the one with most samples at once is lowered."""
        largest = max(plans, key=self._samples)
        passes = Passes(lower(self.oracle.at(self.batch), largest), self.oracle.kernels)
        holdings = Holdings(passes, self.oracle.machine.device.host)
        for plan in plans:
            machine = self.oracle.crowded(plan)
            relaxed = Relaxed(plan, passes, machine, self.gain, machine.shared_cores(plan.ranks))
            seconds = relaxed.busiest()
            if self._score(seconds, 0.0, plan) < self.kept.worst and self.kept.objective != "memory":
                seconds = max(seconds, relaxed.seconds())
            if self._score(seconds, 0.0, plan) >= self.kept.worst:
                continue
            least = least_bytes(relaxed, holdings, self.oracle.optimizer_slots)
            if least > self.limit.of(plan.ranks):
                self._refuse(plan, least, "at least ")
                self.too_large.append((least / self.limit.of(plan.ranks), len(self.too_large), plan))
            else:
                yield self._score(seconds, least, plan), plan

    def _oracle_of(self, plan: Plan) -> Oracle:
        """Return an oracle of its own for each shape, so that what it remembers can be forgotten."""
        shape = (plan.stages, plan.data, plan.halo)
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


def _gain(oracle: Oracle) -> float:
    """Return how much faster a rank works beside idle cores than on a busy node, at most."""
    device, kernels = oracle.machine.device, oracle.kernels.kernels
    if not device.host:
        return 1.0
    most = max(device.alone_speedup, device.update_alone_speedup, 1.0)
    if isinstance(kernels, Roofline):
        return most
    if isinstance(kernels, Profile):
        return max(most, *(n for entry in kernels.entries.values() for n in entry.alone.values()), 1.0)
    return math.inf
