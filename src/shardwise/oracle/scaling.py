"""Scaling curves: every strategy on more and more ranks, with a fixed mini-batch or one that grows along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.graph import Graph, Kind
from shardwise.machine import Machine
from shardwise.oracle.kernels import KernelTimes, Roofline
from shardwise.oracle.prediction import seconds_text
from shardwise.oracle.search.allowance import Allowance, check_ranks
from shardwise.oracle.search.bounds import rows_of_candidates
from shardwise.oracle.search.coarse import Coarse
from shardwise.oracle.search.legal import Legality
from shardwise.oracle.search.space import Candidate
from shardwise.oracle.strategies import STRATEGIES, family


@dataclass(frozen=True)
class Point:
    """The best plan of a strategy on a number of ranks; without a plan, `reason` says why there is none.

    `efficiency` is the throughput of a rank against that of one device with all the memory that it needs.
    """

    strategy: str
    ranks: int
    batch: int
    plan: str = ""
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    efficiency: float = 0.0
    peak_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Scaling:
    """The curves of all strategies; `weak` lets the mini-batch grow with the ranks."""

    points: tuple[Point, ...]
    weak: bool
    machine: str

    def curve(self, strategy: str) -> tuple[Point, ...]:
        """Return the points of one strategy, those without a plan left out."""
        return tuple(p for p in self.points if p.strategy == strategy and p.plan)

    def __str__(self) -> str:
        counts = sorted({p.ranks for p in self.points})
        names = list(dict.fromkeys(p.strategy for p in self.points))
        cells = {(p.strategy, p.ranks): p for p in self.points}
        rows = [["strategy", *map(str, counts)]]
        for name in names:
            found = [cells.get((name, n)) for n in counts]
            rows.append([name, *(_cell(point) for point in found)])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        kind = "weak: the mini-batch grows with the ranks" if self.weak else "strong: one mini-batch"
        return "\n".join([f"{self.machine}, {kind}; step and efficiency by ranks", *lines])


def scaling(
    graph: Graph,
    machine: Machine | str,
    ranks: Sequence[int],
    batch: int | None = None,
    *,
    weak: bool = False,
    strategies: Sequence[str] = STRATEGIES,
    memory: float | None = None,
    kernels: KernelTimes | None = None,
    optimizer_slots: float = 1.0,
) -> Scaling:
    """Return the scaling curves of strategies.

    Args:
        graph: a captured network, with its loss behind it where it has one.
        machine: a `Machine`, a preset's name or a TOML file.
        ranks: the numbers of ranks.
        batch: samples of the mini-batch; with `weak` those of each rank; default: those of the graph.
        weak: let the mini-batch grow with the ranks.
        strategies: some of `STRATEGIES`.
        memory: bytes that a rank may use; default: what the device has.
        kernels: times of computations; default a roofline of the machine's device.
        optimizer_slots: copies of the parameters that the optimizer keeps.
    """
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown:
        raise ValueError(f"strategies: {unknown[0]!r} found; choose of {', '.join(STRATEGIES)}")
    where, samples = Machine.load(machine), batch or graph.batch
    for count in ranks:
        check_ranks(where, count)
    limit = Allowance(where, memory)
    times = kernels or Roofline(where.device)
    small = graph.with_batch(samples)
    alone = _Curves(small, where, times, optimizer_slots, {("data", 1): list(family("data", 1, 0))[:1]})
    serial = samples / alone.best("data", 1, float("inf"))[1]
    points, curves = [], None
    for count in ranks:
        size = samples * count if weak else samples
        if weak or curves is None:
            counts = [count] if weak else list(ranks)
            dims = max((len(layer.shape) - 2 for layer in graph if layer.kind is Kind.INPUT), default=0)
            wanted = {(s, n): list(family(s, n, max(0, dims))) for s in strategies for n in counts}
            curves = _Curves(graph.with_batch(size), where, times, optimizer_slots, wanted)
        points += [_point(curves, strategy, count, size, limit.of(count), serial) for strategy in strategies]
    return Scaling(tuple(points), weak, where.name)


class _Curves:
    """Evaluate the plans of some strategies on some numbers of ranks."""

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        kernels: KernelTimes,
        slots: float,
        wanted: dict[tuple[str, int], list[Candidate]],
    ) -> None:
        legality = Legality(graph)
        self.reasons: dict[tuple[str, int], str] = {}
        good: dict[tuple[str, int], list[Candidate]] = {}
        for key, plans in wanted.items():
            good[key] = []
            for c in plans:
                said = legality.of_split(c.split) or legality.of_sizes(c.stages, c.data * c.parts)
                if said:
                    self.reasons[key] = said
                else:
                    good[key].append(c)
        distinct = dict.fromkeys(c for plans in good.values() for c in plans)
        rows = rows_of_candidates(distinct, graph.batch)
        self.coarse = Coarse(graph, machine, kernels, rows, optimizer_slots=slots)
        places = {
            self.coarse.candidate(index, row): (index, row)
            for index, found in enumerate(self.coarse.rows)
            for row in range(len(found))
        }
        self.places = {key: [places[c] for c in plans] for key, plans in good.items()}
        self.bounds = [self.coarse.seconds(index) for index in range(len(self.coarse.rows))]

    def best(self, strategy: str, ranks: int, limit: float) -> tuple[Candidate | None, float, float]:
        """Return the fastest plan that fits, its seconds and bytes; without one the least bytes."""
        best: tuple[Candidate | None, float, float] = (None, float("inf"), float("inf"))
        least = float("inf")
        for index, row in sorted(self.places[strategy, ranks], key=lambda at: self.bounds[at[0]][at[1]]):
            if self.bounds[index][row] >= best[1]:
                break
            outcome = self.coarse.evaluate(index, row)
            if outcome.peak_bytes > limit:
                least = min(least, outcome.peak_bytes)
            elif outcome.seconds < best[1]:
                best = (self.coarse.candidate(index, row), outcome.seconds, outcome.peak_bytes)
        return best if best[0] is not None else (None, best[1], least)


def _point(curves: _Curves, strategy: str, ranks: int, batch: int, limit: float, serial: float) -> Point:
    c, seconds, peak = curves.best(strategy, ranks, limit)
    if c is None:
        reason = curves.reasons.get((strategy, ranks), f"no plan of this kind for {ranks} ranks")
        if peak < float("inf"):
            reason = f"a rank needs at least {peak / 1e9:.3g} GB of {limit / 1e9:.3g} GB"
        return Point(strategy, ranks, batch, reason=reason)
    rate = batch / seconds
    return Point(strategy, ranks, batch, str(c), seconds, rate, rate / serial / ranks, int(peak))


def _cell(point: Point | None) -> str:
    if point is None or not point.plan:
        return "-"
    return f"{seconds_text(point.step_seconds)} {100 * point.efficiency:.0f} %"
