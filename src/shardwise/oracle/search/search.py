"""Search all plans for a number of ranks: bound them, simulate what may be best, rank it.

Nothing is dropped but plans that need more memory than there is, and plans that have a lower bound which is
no better than what is already among the best `keep`. Small worlds are simulated event by event (`few`), large
ones pass by pass (`worlds`), which is also where small ones begin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardwise.graph import Graph
from shardwise.machine import Machine
from shardwise.oracle.kernels import KernelTimes
from shardwise.oracle.predict import Oracle, oracle_of
from shardwise.oracle.search.allowance import Allowance, Nearest, check_ranks
from shardwise.oracle.search.bounds import Rows
from shardwise.oracle.search.coarse import Coarse
from shardwise.oracle.search.few import Few, Progress
from shardwise.oracle.search.kept import OBJECTIVES, Kept
from shardwise.oracle.search.ranking import Entry, Ranking, front_of, no_plan
from shardwise.oracle.search.tally import Tally
from shardwise.oracle.search.worlds import Worlds, legal_rows
from shardwise.plan import Plan

# Up to so many ranks plans are ranked by a simulation of every event.
EXACT_RANKS = 8
# Before that so many of those that a quicker search holds for the best.
_QUICKLY_BEST = 16
Answer = tuple[list[Entry], Nearest | None]


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
    front: bool = False,
    progress: Progress | None = None,
) -> Ranking:
    """Rank the plans of a network on a machine; where none fits, say which one comes nearest (`NoPlanError`).

    Args:
        graph: a captured network, with its loss behind it where it has one.
        machine: a `Machine`, a preset's name or a TOML file.
        ranks: how many there are; plans may leave some of them idle.
        batch: samples of the global mini-batch; default: those of the graph.
        memory: bytes that a rank may use; default: what the device has, or, where the ranks of a plan
            share a host, its part of that.
        objective: `time`, `memory` (bytes of the fullest rank) or `cost` (ranks x seconds).
        keep: how many plans to rank.
        kernels: times of computations; default a roofline of the machine's device.
        optimizer_slots: copies of the parameters that the optimizer keeps.
        exact: simulate every plan event by event that may be best; default: on up to 8 ranks. If not,
            one rank stands for each stage's group, which is quicker and may miss the best by a little.
        all_ranks: only plans that use all ranks.
        refuse: says why a plan must not be used, or nothing.
        front: look for the whole front of time, memory and ranks, which takes longer: on few ranks it is
            that of simulating every plan; else it is that of what is simulated for all three objectives.
            Without this it is that of the plans which were simulated because they may be best.
        progress: is told how many of how many plans are done with, while they are simulated event by event.
    """
    where = Machine.load(machine)
    check_ranks(where, ranks)
    oracle = oracle_of(graph, where, kernels, optimizer_slots=optimizer_slots)
    samples, limit, tally = batch or graph.batch, Allowance(where, memory), Tally()
    rows = legal_rows(oracle.at(samples), ranks, all_ranks, tally, refuse)

    kept, all_events = Kept(objective, keep), ranks <= EXACT_RANKS if exact is None else exact
    if all_events:
        quick, _ = _many(oracle, samples, rows, [Kept(objective, _QUICKLY_BEST)], limit, Tally())
        first = [entry.plan for entry in _ordered(quick, objective)[:_QUICKLY_BEST]]
        found, nearest = _few(oracle, samples, rows, kept, limit, tally, first, front, progress)
    else:
        wanted = [kept, *(Kept(name, keep) for name in OBJECTIVES if front and name != objective)]
        found, nearest = _many(oracle, samples, rows, wanted, limit, tally)
    ranking = Ranking(
        tuple(_ordered(found, objective)[:keep]),
        front_of(found),
        tuple(tally.reasons),
        tally.counts,
        objective,
        where.name,
        ranks,
        limit.of(ranks),
        front and all_events,
    )
    if not found:
        raise no_plan(ranking, str(nearest or ""))
    return ranking


def _ordered(found: list[Entry], objective: str) -> list[Entry]:
    return sorted(found, key=lambda e: (e.score(objective), e.ranks))


def _many(
    oracle: Oracle, batch: int, rows: list[Rows], wanted: list[Kept], limit: Allowance, tally: Tally
) -> Answer:
    kernels, slots = oracle.kernels.kernels, oracle.optimizer_slots
    coarse = Coarse(oracle.at(batch), oracle.machine, kernels, rows, optimizer_slots=slots)
    ask = partial(oracle.predict, batch=batch)
    found: dict[Plan, Entry] = {}
    for kept in wanted:
        # What is refused and enumerated is the same for all of them.
        counted = tally if kept is wanted[0] else Tally()
        worlds = Worlds(coarse, kept, limit, counted)
        for c, o in worlds.run():
            limited = limit.of(c.ranks)
            entry = Entry(c.plan(), o.seconds, batch, o.peak_bytes, c.ranks, ask, o.words, limited)
            found.setdefault(entry.plan, entry)
    tally.simulated = len(found)
    return list(found.values()), None if found else worlds.nearest()


def _few(
    oracle: Oracle,
    batch: int,
    rows: list[Rows],
    kept: Kept,
    limit: Allowance,
    tally: Tally,
    first: list[Plan],
    front: bool,
    progress: Progress | None,
) -> Answer:
    ask = partial(oracle.predict, batch=batch)
    few = Few(oracle, batch, rows, kept, limit, tally, first, front, progress)
    entries = [
        Entry(plan, seconds, batch, peak, plan.ranks, ask, memory_bytes=limit.of(plan.ranks))
        for plan, seconds, peak in few.run()
    ]
    return entries, None if entries else few.nearest()
