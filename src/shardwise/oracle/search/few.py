"""Search a small world: every plan that may be best is simulated event by event.

Each plan is bounded twice before that (`relaxed`): by what its busiest rank works, and, unless that is enough
to drop it, by a step that waits for less. What a quicker search holds for the best plans is simulated first,
so that the bounds have something to be compared with.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
from shardwise.plan.micro_batches import micro_batches_of, samples_of
from shardwise.program.lowered import lower

# Lowered and priced stages of so many shapes are kept.
_MOST_ORACLES = 16
Found = tuple[Plan, float, float]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Bound:
    """What a plan cannot beat: its score, seconds, and bytes of the fullest rank."""

    plan: Plan
    score: float
    seconds: float
    nbytes: float


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
        front: look for all plans that none beats in time, memory and ranks, too.
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
        front: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.oracle, self.batch, self.rows = oracle, batch, rows
        self.kept, self.limit, self.tally = kept, limit, tally
        self.first, self.progress = first, progress or (lambda done, total: None)
        self.front, self.gain = front, _gain(oracle)
        self.done: set[Plan] = set()
        self._oracles: OrderedDict[object, Oracle] = OrderedDict()
        self.found: list[Found] = []
        self._nearest: Nearest | None = None
        self.too_large: list[tuple[float, int, Plan]] = []

    def run(self) -> list[Found]:
        """Simulate in the order of the bounds until no bound is better than what is kept."""
        for plan in self.first:
            self._simulate(plan)
        self.done, total = set(self.first), sum(len(rows) for rows in self.rows)
        bounded: list[Bound] = []
        for number, bound in enumerate(self._bounded()):
            self.progress(number, total)
            if bound is not None:
                bounded.append(bound)
        for bound in sorted(bounded, key=lambda bound: bound.score):
            if bound.score < self.kept.worst:
                self._simulate(bound.plan)
                self.done.add(bound.plan)
        for bound in sorted(bounded, key=lambda bound: bound.seconds) if self.front else ():
            if bound.plan not in self.done and not self._beaten(bound.plan, bound.seconds, bound.nbytes):
                self._simulate(bound.plan)
        self.progress(total, total)
        return self.found

    def _beaten(self, plan: Plan, seconds: float, nbytes: float) -> bool:
        """Tell whether some plan is at least as good in time, memory and ranks as this one's bounds."""
        return any(
            t <= seconds and peak <= nbytes and other.ranks <= plan.ranks for other, t, peak in self.found
        )

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

    def _bounded(self) -> Iterator[Bound | None]:
        """Yield what plans cannot beat; nothing for those that cannot be better than what is known."""
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

        Replicas share statistics, and with them or other micro-batches the loss is a sum. Where tiles end
        depends on whether ranks can share samples; up to there tiles are the same, unless the halos of
        several layers are fetched together.
        """
        fused = plan.halo != "layer" and plan.stages[0].way is Way.SPATIAL
        whole = plan.data * micro_batches_of(plan) == 1
        return (plan.stages, plan.data > 1, whole, fused and self._samples(plan) < plan.stages[0].width)

    def _samples(self, plan: Plan) -> int:
        lo, hi = samples_of(plan, self.batch, 0, 0)
        return hi - lo

    def _scores(self, plans: Sequence[Plan]) -> Iterator[Bound | None]:
        """Bound plans that cut and split the network alike: the one with most samples at once is lowered."""
        largest = max(plans, key=self._samples)
        passes = Passes(lower(self.oracle.at(self.batch), largest), self.oracle.kernels)
        holdings = Holdings(passes, self.oracle.machine.device.host)
        for plan in plans:
            machine = self.oracle.crowded(plan)
            relaxed = Relaxed(plan, passes, machine, self.gain, machine.shared_cores(plan.ranks))
            yield None if plan in self.done else self._bound(relaxed, holdings)

    def _bound(self, relaxed: Relaxed, holdings: Holdings) -> Bound | None:
        """Bound one plan closer and closer, as long as it may be better than what is known."""
        plan, kept = relaxed.plan, self.kept
        seconds = relaxed.busiest()
        better = kept.score(seconds, 0.0, plan.ranks) < kept.worst
        if better and kept.objective != "memory":
            seconds = max(seconds, relaxed.seconds())
            better = kept.score(seconds, 0.0, plan.ranks) < kept.worst
        if not better and not self.front:
            return None
        least, limit = least_bytes(relaxed, holdings, self.oracle.optimizer_slots), self.limit.of(plan.ranks)
        if least > limit:
            self._refuse(plan, least, "at least ")
            self.too_large.append((least / limit, len(self.too_large), plan))
            return None
        score = kept.score(seconds, least, plan.ranks)
        if self.front and score >= kept.worst:
            if not self._beaten(plan, seconds, least):
                seconds = max(seconds, relaxed.seconds())
            if self._beaten(plan, seconds, least):
                return None
        return Bound(plan, score, seconds, least)

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
