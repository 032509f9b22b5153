"""Ask the oracle, with kernels measured on this machine where it is the one that is asked about.

`shardwise.oracle` prices with what it is given. Here the gaps are filled: what was profiled on this device is
loaded from the user's cache, and layer shapes that were never seen are profiled within a budget first. What
is then still missing is scaled from similar shapes and flagged in the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from shardwise.graph import Graph, Kind
from shardwise.machine import Machine
from shardwise.oracle import predict as oracle_predict
from shardwise.oracle.kernels import KernelTimes
from shardwise.oracle.prediction import Prediction
from shardwise.oracle.profile import Profile, cache_path, level
from shardwise.oracle.questions import over_ranks
from shardwise.oracle.search import Ranking
from shardwise.plan import Plan, PlanError
from shardwise.plan.check import check
from shardwise.runtime.calibrate.demand import complete, fresh_profile, is_here, load_profile

# A search profiles the shapes of so many of the best plans, in rounds, because times change the order.
_PROFILED = 8
_ROUNDS = 2
# And those of so many are timed once more in the end, all in turn.
_LEADERS = 4
_loaded: dict[Path, tuple[int, Profile]] = {}


def predict(
    graph: Graph,
    plan: Plan | str,
    machine: Machine | str | Path,
    batch: int | None = None,
    *,
    kernels: KernelTimes | None = None,
    optimizer_slots: float = 1.0,
    profile_seconds: float = 0.0,
) -> Prediction:
    """Predict a training step of a network under a plan on a machine.

    Args:
        graph: a captured network; with its loss behind it (`attach`), or its output counts as the end.
        plan: a `Plan` or its one line.
        machine: a `Machine`, a preset's name or a TOML file.
        batch: samples of the global mini-batch; default: those the graph was captured with.
        kernels: times of computations; default what was profiled if the machine is this one, else a
            roofline of its device.
        optimizer_slots: copies of the parameters that the optimizer keeps (momentum 1, Adam 2).
        profile_seconds: budget for measuring layer shapes that were not seen before.
    """
    where, chosen = Machine.load(machine), Plan.parse(plan)
    times = kernels
    if times is None:
        times = profiled(graph, where, [chosen], batch or graph.batch, profile_seconds)
    return oracle_predict(graph, chosen, where, batch, kernels=times, optimizer_slots=optimizer_slots)


def search(
    graph: Graph,
    machine: Machine | str | Path,
    ranks: int | Sequence[int],
    batch: int | None = None,
    *,
    memory: float | None = None,
    objective: str = "time",
    keep: int = 10,
    kernels: KernelTimes | None = None,
    optimizer_slots: float = 1.0,
    profile_seconds: float = 0.0,
    exact: bool | None = None,
    all_ranks: bool = False,
    refuse: Callable[[Plan], str] | None = None,
    front: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Ranking:
    """Rank the plans of a network on a machine, best first.

    Args:
        graph: a captured network, with its loss behind it where it has one.
        machine: a `Machine`, a preset's name or a TOML file.
        ranks: how many there are; plans may leave some of them idle. Several numbers are ranked together.
        batch: samples of the global mini-batch; default: those of the graph.
        memory: bytes that a rank may use; default: what the device has.
        objective: `time`, `memory` (bytes of the fullest rank) or `cost` (ranks x seconds).
        keep: how many plans to rank.
        kernels: times of computations; default what was profiled if the machine is this one, else a
            roofline of its device.
        optimizer_slots: copies of the parameters that the optimizer keeps.
        profile_seconds: budget for measuring layer shapes of the best plans that were not seen before.
        exact: simulate every plan event by event that may be best; default: on up to 8 ranks. If not,
            one rank stands for each stage's group, which is quicker and may miss the best by a little.
        all_ranks: only plans that use all ranks.
        refuse: says why a plan must not be used, or nothing.
        front: look for the whole front of time, memory and ranks, which takes longer; exact on up to 8 ranks.
        progress: is told how many of how many plans are done with, while they are simulated event by event.
    """
    where, samples = Machine.load(machine), batch or graph.batch
    counts = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    ranked = partial(
        over_ranks,
        graph,
        where,
        counts,
        batch,
        memory=memory,
        objective=objective,
        optimizer_slots=optimizer_slots,
        exact=exact,
        all_ranks=all_ranks,
        refuse=refuse,
        front=front,
        progress=progress,
    )
    times = kernels if kernels is not None else profiled(graph, where, (), samples, 0.0)
    if kernels is None and profile_seconds > 0 and is_here(where):
        wanted = _usable((p for n in counts for p in usual_plans(graph, n)), graph, samples)
        for _ in range(_ROUNDS):
            wanted += [entry.plan for entry in ranked(kernels=times, keep=_PROFILED)]
            times = profiled(graph, where, wanted, samples, profile_seconds / (_ROUNDS + 1))
        leaders = [entry.plan for entry in ranked(kernels=times, keep=_LEADERS)]
        times = timed_again(graph, where, leaders, samples, profile_seconds / (_ROUNDS + 1))
    return ranked(kernels=times, keep=keep)


def profiled(
    graph: Graph, machine: Machine, plans: Iterable[Plan], batch: int, seconds: float
) -> KernelTimes | None:
    """Return the profile of this device, completed for some plans within a budget; None elsewhere."""
    if not is_here(machine):
        return None
    profile = _profile(machine)
    if seconds > 0 and complete(profile, graph, machine, plans, batch, seconds):
        path = cache_path(machine.device.name, machine.device.threads)
        profile.save(path)
        # Predictions are remembered for a profile, so that another one must take its place.
        _loaded.pop(path, None)
        profile = _profile(machine)
    return profile if profile.entries else None


def timed_again(
    graph: Graph, machine: Machine, plans: Sequence[Plan], batch: int, seconds: float
) -> KernelTimes | None:
    """Return the profile of this device with the computations of some plans timed once more, all in turn.

    Those of the first rounds were timed minutes apart, and how fast the machine is wavers: it would choose.
    What is taken from the new times is how they compare with each other, not how fast the machine was.
    """
    profile = _profile(machine)
    if len(plans) > 1:
        level(profile, fresh_profile(graph, machine, plans, batch, seconds))
        path = cache_path(machine.device.name, machine.device.threads)
        profile.save(path)
        _loaded.pop(path, None)
    return _profile(machine)


def usual_plans(graph: Graph, ranks: int) -> list[Plan]:
    """Return one plan of every strategy, whose layer shapes are worth knowing before anything is ranked."""
    dims = max((len(layer.shape) - 2 for layer in graph if layer.kind is Kind.INPUT), default=0)
    texts = ["data=1"]
    if ranks > 1:
        texts += [f"data={ranks}", f"filter={ranks}", f"channel={ranks}", f"stages={ranks} schedule=layer"]
        texts += [f"spatial={'x'.join([str(ranks)] + ['1'] * (dims - 1))}"] if dims > 0 else []
    return [Plan.parse(text) for text in texts]


def _usable(plans: Iterable[Plan], graph: Graph, batch: int) -> list[Plan]:
    result = []
    for plan in plans:
        try:
            check(plan, graph, batch=batch)
        except PlanError:
            continue
        result.append(plan)
    return result


def _profile(machine: Machine) -> Profile:
    """Return what is known about a device, read again only when the file has changed."""
    path = cache_path(machine.device.name, machine.device.threads)
    stamp = path.stat().st_mtime_ns if path.is_file() else 0
    if path not in _loaded or _loaded[path][0] != stamp:
        _loaded[path] = (stamp, load_profile(machine))
    return _loaded[path][1]
