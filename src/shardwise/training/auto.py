"""Choose the plan of a job when the user gives none: know the machine, search, say why, agree on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from torch import optim

from shardwise.ask import profiled
from shardwise.ask import search as ask_search
from shardwise.graph import Graph
from shardwise.machine import Machine
from shardwise.oracle import Oracle, Prediction, choose
from shardwise.oracle.settle import settle
from shardwise.plan import Plan, PlanError, Way, micro_batches_of
from shardwise.program.norms import updates_buffers
from shardwise.runtime.calibrate.crew import crew, share
from shardwise.runtime.calibrate.here import known_machine, measured_machine
from shardwise.runtime.session import Session
from shardwise.training.given import check_samples, shared_out

CALIBRATE_SECONDS = 30.0
PROFILE_SECONDS = 20.0


@dataclass(frozen=True)
class Auto:
    """A chosen plan, the same on every rank, what is predicted for it, and why."""

    plan: Plan
    prediction: Prediction | None = None
    reasons: tuple[str, ...] = ()


def auto_plan(
    graph: Graph,
    session: Session,
    batch: int,
    *,
    machine: Machine | str | Path | None = None,
    profile_seconds: float = PROFILE_SECONDS,
    optimizer_slots: float = 1.0,
    refuse: Callable[[Plan], str] | None = None,
    show: bool = True,
) -> Auto:
    """Return the fastest plan for the ranks of a job that changes nothing but its speed; all ranks call this.

    The machine is what the user says, a file, or what was measured before; else the ranks of the job
    measure it now, once, for half a minute. Rank 0 searches and says why; every rank gets its answer.

    Args:
        graph: the network with its loss.
        session: the job.
        batch: samples of a global mini-batch.
        machine: see `known_machine`.
        profile_seconds: budget for layer shapes that were not measured before.
        optimizer_slots: copies of the parameters that the optimizer keeps.
        refuse: says why a plan must not be used, or nothing; by default what `changes_numbers` says.
        show: whether rank 0 prints the ranking and the reasons.
    """
    if session.size == 1:
        return Auto(Plan())
    console = Console(stderr=True, quiet=not show or session.rank > 0, soft_wrap=True, highlight=False)
    found: Auto | ValueError | None = None
    with crew() as leads:
        if leads:
            try:
                found = _choose(
                    graph,
                    session,
                    batch,
                    machine,
                    profile_seconds,
                    optimizer_slots,
                    refuse or partial(changes_numbers, graph),
                    console,
                )
            except ValueError as error:
                found = error  # every rank is to hear of it, not only this one
    found = share(session, found)
    if isinstance(found, ValueError):
        raise found
    assert found is not None  # rank 0 has put one or the other there
    return found


def _choose(
    graph: Graph,
    session: Session,
    batch: int,
    given: Machine | str | Path | None,
    seconds: float,
    slots: float,
    refuse: Callable[[Plan], str],
    console: Console,
) -> Auto:
    known = known_machine(session, given)
    if known is None:
        console.print(f"plan=auto: measuring this machine for about {CALIBRATE_SECONDS:.0f} s, once")
        where = measured_machine(session, CALIBRATE_SECONDS, quiet=console.quiet)
    else:
        where = known[0]
        console.print(f"plan=auto: machine {known[1]}")
    if seconds > 0:
        # The shapes of the best plans are measured; the ranking that comes of it is made again below.
        settings = {"optimizer_slots": slots, "profile_seconds": seconds, "all_ranks": True}
        ask_search(graph, where, session.size, batch, keep=1, refuse=refuse, **settings)  # type: ignore[arg-type]
    kernels = profiled(graph, where, (), batch, 0.0)
    choice = choose(
        graph, where, session.size, batch, kernels=kernels, optimizer_slots=slots, refuse=refuse, keep=5
    )
    console.print(str(choice))
    # What travels to the other ranks are numbers and words.
    words = choice.prediction.bottleneck
    prediction = replace(choice.prediction, why=partial(str, words), timeline=())
    return Auto(choice.plan, prediction, choice.reasons)


def is_open(plan: Plan, *, cut: bool = True) -> bool:
    """Tell whether a plan leaves something to the oracle; where stages begin only if it may `cut` them."""
    tiled = any(split.way is Way.SPATIAL for split in plan.stages)
    uncut = len(plan.stages) > 1 and not plan.cuts
    return plan.halo == "auto" or (tiled and plan.tail == "auto") or (uncut and cut)


def settled_plan(
    graph: Graph,
    session: Session,
    plan: Plan,
    batch: int,
    machine: Machine | str | Path | None = None,
    optimizer_slots: float = 1.0,
) -> Plan:
    """Return a plan with its open questions answered, the same on every rank; all ranks call this.

    Where the machine is not known, and it is not measured for this alone, the program's rules decide.
    """
    found = plan
    known = known_machine(session, machine) if session.rank == 0 else None
    if known is not None:
        where = known[0]
        kernels = profiled(graph, where, (), batch, 0.0)
        oracle = Oracle(graph, where, kernels, optimizer_slots=optimizer_slots)
        found = settle(oracle, plan, batch).plan
    return Plan.parse(share(session, str(found)))


def changes_numbers(graph: Graph, plan: Plan, ending: Graph | None = None, loss_mean: str = "exact") -> str:
    """Say what a plan would change about training other than its speed; nothing if it is exact.

    Batch norm over micro-batches, and shares of a loss that they would change, are settings that a user may
    name, but not what `auto` may choose. Shares of a network that mixes samples nobody may have.

    Args:
        graph: the network with its loss.
        plan: how to split it.
        ending: the loss alone; default: it is a mean over samples.
        loss_mean: what the user accepts of the loss.
    """
    parts = micro_batches_of(plan)
    for layer in graph if parts > 1 else ():
        # An instance norm that tracks statistics updates them once per micro-batch.
        tracked = layer.op == "instance_norm" and updates_buffers(layer)
        if tracked or layer.attributes.get("batch_statistics"):
            name = layer.op.replace("_", " ")
            return f"{name} would see {parts} micro-batches instead of the mini-batch"
    try:
        check_samples(graph, plan)
        if ending is not None:
            shared_out(ending, plan, loss_mean)
    except PlanError as error:
        return str(error)
    return ""


def slots_of(optimizer: optim.Optimizer) -> float:
    """Return how many copies of the parameters an optimizer keeps."""
    settings = optimizer.defaults
    if "betas" in settings:
        return 2.0 + float(bool(settings.get("amsgrad")))
    return float(any(settings.get(name) for name in ("momentum", "alpha", "lr_decay")))
