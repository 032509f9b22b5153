"""Search all plans for a number of ranks: bound them, simulate what may be best, rank it.

Nothing is dropped but plans that need more memory than there is, and plans whose lower bound (`coarse`) is no
better than what is already among the best `keep`. Small worlds are simulated event by event, large ones pass
by pass.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from shardwise.graph import Graph, Kind
from shardwise.machine import Machine
from shardwise.oracle.kernels import KernelTimes
from shardwise.oracle.predict import Oracle, oracle_of
from shardwise.oracle.search.coarse import Coarse
from shardwise.oracle.search.legal import Legality
from shardwise.oracle.search.ranking import Counts, Entry, Ranking, Refused
from shardwise.oracle.search.space import Candidate, halos_of, replicas, shapes, splits, timings
from shardwise.plan import Plan, PlanError, Split

OBJECTIVES = ("time", "memory", "cost")
# Up to so many ranks every plan that is simulated is simulated event by event.
EXACT_RANKS = 8
# How many refused plans are listed for each kind of reason; all are counted.
_SHOWN = 50
# The bound adds up inner ranks' times; where all ranks are simulated it is lowered by more than the two
# ways of adding up were ever found to differ.
_SLACK = 0.75


@dataclass
class _Tally:
    enumerated: int = 0
    refused: int = 0
    pruned: int = 0
    simulated: int = 0
    reasons: list[Refused] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def refuse(self, plan: Candidate | str, reason: str, count: int = 1) -> None:
        self.refused += count
        # One common reason must not crowd out the others.
        kind = re.sub(r"[\d.e+-]+", "", reason)
        self.kinds[kind] += 1
        if self.kinds[kind] <= _SHOWN:
            self.reasons.append(Refused(str(plan), reason, count))


def search(
    graph: Graph,
    machine: Machine | str,
    ranks: int,
    batch: int | None = None,
    *,
    memory: float | None = None,
    objective: str = "time",
    keep: int = 10,
    kernels: KernelTimes | None = None,
    optimizer_slots: float = 1.0,
    exact: bool | None = None,
    all_ranks: bool = False,
    refuse: Callable[[Plan], str] | None = None,
) -> Ranking:
    """Rank the plans of a network on a machine.

    Args:
        graph: a captured network, with its loss behind it where it has one.
        machine: a `Machine`, a preset's name or a TOML file.
        ranks: how many there are; plans may leave some of them idle.
        batch: samples of the global mini-batch; default: those of the graph.
        memory: bytes that a rank may use; default: what the device has.
        objective: `time`, `memory` (bytes of the fullest rank) or `cost` (ranks x seconds).
        keep: how many plans to rank.
        kernels: times of computations; default a roofline of the machine's device.
        optimizer_slots: copies of the parameters that the optimizer keeps.
        exact: simulate event by event; default: for few ranks only.
        all_ranks: only plans that use all ranks.
        refuse: says why a plan must not be used, or nothing.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective: {objective!r} found; choose one of {', '.join(OBJECTIVES)}")
    if ranks < 1:
        raise ValueError(f"ranks: {ranks} found; at least 1")
    where = Machine.load(machine)
    oracle = oracle_of(graph, where, kernels, optimizer_slots=optimizer_slots)
    samples = batch or graph.batch
    limit = memory or where.device.memory_bytes
    fine = ranks <= EXACT_RANKS if exact is None else exact
    run = _Search(oracle, samples, limit, objective, keep, fine)
    run.refuse = refuse
    run.collect(ranks, all_ranks)
    run.simulate()
    return run.ranking(ranks)


class _Search:
    def __init__(
        self, oracle: Oracle, batch: int, limit: float, objective: str, keep: int, exact: bool
    ) -> None:
        self.oracle, self.batch, self.limit, self.exact = oracle, batch, limit, exact
        self.objective, self.keep = objective, keep
        self.graph = oracle.at(batch)
        slots = oracle.optimizer_slots
        self.coarse = Coarse(self.graph, oracle.machine, oracle.kernels.kernels, optimizer_slots=slots)
        self.legality = Legality(self.graph)
        self.tally = _Tally()
        self.queue: list[tuple[float, int, Candidate]] = []
        self.found: list[Entry] = []
        self.best: list[float] = []
        self.refuse: Callable[[Plan], str] | None = None

    def collect(self, ranks: int, all_ranks: bool) -> None:
        """List all plans with their bounds; refuse what cannot be used wherever the network is cut."""
        dims = max((len(layer.shape) - 2 for layer in self.graph if layer.kind is Kind.INPUT), default=0)
        number = itertools.count()
        for split in splits(ranks, max(0, dims)):
            groups = list(self._groups(split, ranks, all_ranks))
            reason = self.legality.of_split(split)
            if reason:
                count = sum(self._count(split, *group) for group in groups)
                self.tally.enumerated += count
                if count:
                    self.tally.refuse(f"... {split} ...", reason, count)
                continue
            for data, count, singles in groups:
                for c in self._timed(split, data, count, singles):
                    self.tally.enumerated += 1
                    reason = self.legality.of(c, self.batch)
                    if not reason and self.refuse is not None:
                        reason = self.refuse(c.plan())
                    if reason:
                        self.tally.refuse(c, reason)
                    else:
                        self.queue.append((self._bound(c), next(number), c))
        heapq.heapify(self.queue)

    def _groups(self, split: Split, ranks: int, all_ranks: bool) -> Iterator[tuple[int, int, int]]:
        for count, singles in shapes(ranks, split):
            for data in replicas(ranks, count * split.width + singles, all_ranks):
                yield data, count, singles

    def _count(self, split: Split, data: int, count: int, singles: int) -> int:
        return sum(1 for _ in timings(count + singles)) * len(halos_of(split))

    def _timed(self, split: Split, data: int, count: int, singles: int) -> Iterator[Candidate]:
        for schedule, micro, replication in timings(count + singles):
            for halo in halos_of(split):
                yield Candidate(data, split, count, singles, schedule, micro, replication, halo)

    def _bound(self, c: Candidate) -> float:
        if self.objective == "memory":
            return self.coarse.least_bytes(c)
        seconds = self.coarse.bound(c) * (_SLACK if self.exact else 1.0)
        return seconds * c.ranks if self.objective == "cost" else seconds

    def _score(self, entry: Entry) -> float:
        return {"time": entry.step_seconds, "memory": entry.peak_bytes, "cost": entry.cost}[self.objective]

    def _worst_kept(self) -> float:
        return self.best[self.keep - 1] if len(self.best) >= self.keep else float("inf")

    def simulate(self) -> None:
        """Simulate in the order of the bounds until no bound is better than what is kept."""
        while self.queue:
            bound, number, c = heapq.heappop(self.queue)
            if bound >= self._worst_kept():
                self.tally.pruned += 1 + len(self.queue)
                return
            if number >= 0:
                self._look_closer(bound, number, c)
                continue
            entry = self._simulated(c)
            if entry is not None:
                self.found.append(entry)
                bisect.insort(self.best, self._score(entry))

    def _look_closer(self, bound: float, number: int, c: Candidate) -> None:
        """Put a plan that fits back with a bound for the cuts that the runtime would make."""
        least = self.coarse.least_bytes(c)
        if least > self.limit:
            self.tally.refuse(c, f"a rank needs at least {_gigabytes(least, self.limit)}")
            return
        if self.objective != "memory" and not self.exact:
            peak = self.coarse.peak_bytes(c)
            if peak > self.limit:
                self.tally.refuse(c, f"a rank needs {_gigabytes(peak, self.limit)}")
                return
            closer = self.coarse.closer_bound(c)
            bound = max(bound, closer * c.ranks if self.objective == "cost" else closer)
        heapq.heappush(self.queue, (bound, -1 - number, c))

    def _simulated(self, c: Candidate) -> Entry | None:
        try:
            entry = self._entry(c)
        except PlanError as error:
            self.tally.refuse(c, str(error))
            return None
        if entry.peak_bytes > self.limit:
            self.tally.refuse(c, f"a rank needs {_gigabytes(entry.peak_bytes, self.limit)}")
            return None
        self.tally.simulated += 1
        return entry

    def _entry(self, c: Candidate) -> Entry:
        plan, words = c.plan(), ""
        if self.exact:
            seconds, peak = self.oracle.quick(plan, self.batch)
        else:
            outcome = self.coarse.evaluate(c)
            seconds, peak, words = outcome.seconds, outcome.peak_bytes, outcome.words
        ask = partial(self.oracle.predict, batch=self.batch)
        return Entry(plan, seconds, self.batch, peak, c.ranks, ask, words)

    def ranking(self, ranks: int) -> Ranking:
        """Return what was found."""
        ordered = sorted(self.found, key=lambda e: (self._score(e), e.ranks))
        front: list[Entry] = []
        for entry in sorted(self.found, key=lambda e: (e.step_seconds, e.peak_bytes)):
            if not front or entry.peak_bytes < front[-1].peak_bytes:
                front.append(entry)
        t = self.tally
        return Ranking(
            tuple(ordered[: self.keep]),
            tuple(front),
            tuple(t.reasons),
            Counts(t.enumerated, t.refused, t.pruned, t.simulated),
            self.objective,
            self.oracle.machine.name,
            ranks,
            self.limit,
        )


def _gigabytes(needed: float, limit: float) -> str:
    return f"{needed / 1e9:.3g} GB of {limit / 1e9:.3g} GB"
