"""Put predictions beside measurements: rows, accuracy per strategy, ranking quality."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.commands.subject import build_model, training_graph
from shardwise.commands.trials import TRIED, Subject, Trial, measure_trials
from shardwise.oracle.strategies import strategy_of
from shardwise.plan import Plan, PlanError

if TYPE_CHECKING:
    from shardwise.graph import Graph
    from shardwise.machine import Machine
    from shardwise.oracle.profile import Profile


@dataclass(frozen=True)
class Row:
    """One network under one plan, predicted and measured; bytes are those of a step's own tensors.

    `predicted_seconds` come from computations that were timed before the steps. Where the machine's speed
    changes, `meanwhile_seconds`, from what was timed in turn with the steps, tell how much of a miss is
    the machine's; `drift` is how much slower computations were then.
    """

    model: str
    plan: str
    strategy: str
    ranks: int
    predicted_seconds: float
    measured_seconds: float
    measured_spread: float
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_high_water_bytes: int
    measured_high_water_bytes: int
    meanwhile_seconds: float = 0.0
    drift: float = 0.0


def rows_of(
    subjects: Sequence[Subject],
    plans: Sequence[str],
    machine: Machine,
    repeats: int,
    profile_seconds: float,
    memory: bool = True,
    keep: Path | None = None,
) -> tuple[list[Row], list[dict[str, str]]]:
    """Predict and measure every network under every plan; return the rows and what was refused.

    The times of computations are written into the folder `keep`, if there is one, for `repriced`.
    """
    refused: list[dict[str, str]] = []
    parts = [(subject, *_good(subject, plans, refused)) for subject in subjects]
    share = profile_seconds / max(1, sum(len(by_ranks) for _, _, by_ranks in parts))
    rows = []
    for subject, graph, by_ranks in parts:
        for ranks, texts in sorted(by_ranks.items()):
            found, *profiles = _measured(
                subject, graph, texts, ranks, machine, repeats, share, memory, refused
            )
            rows += found
            if keep is not None:
                for profile, path in zip(profiles, kept(keep, subject, ranks), strict=True):
                    profile.save(path)
    return rows, refused


def kept(folder: Path, subject: Subject, ranks: int) -> tuple[Path, Path]:
    """Return where the times of computations before steps, and in turn with them, are written."""
    before, meanwhile = (folder / f"{subject.name}-{ranks}-{when}.json" for when in ("before", "meanwhile"))
    return before, meanwhile


def repriced(rows: Sequence[Row], subject: Subject, machine: Machine, folder: Path) -> list[Row]:
    """Return rows with the steps that are predicted now from what was measured when they were made."""
    from shardwise.oracle import Oracle
    from shardwise.oracle.kernels import Roofline
    from shardwise.oracle.profile import Profile

    graph, device = training_graph(build_model(subject.name), subject.shape, subject.batch), machine.device
    oracles: dict[int, list[Oracle]] = {}
    result = []
    for row in rows:
        if row.ranks not in oracles:
            profiles = [
                Profile.load(path, device.name, device.threads, Roofline(device))
                for path in kept(folder, subject, row.ranks)
            ]
            oracles[row.ranks] = [Oracle(graph, machine, profile) for profile in profiles]
        seconds = [oracle.seconds(Plan.parse(row.plan), subject.batch) for oracle in oracles[row.ranks]]
        result.append(replace(row, predicted_seconds=seconds[0], meanwhile_seconds=seconds[1]))
    return result


def _good(
    subject: Subject, plans: Sequence[str], refused: list[dict[str, str]]
) -> tuple[Graph, dict[int, list[str]]]:
    """Return the network and the plans that it can be trained under, by ranks."""
    from shardwise.plan.check import check

    graph = training_graph(build_model(subject.name), subject.shape, subject.batch)
    good: dict[int, list[str]] = defaultdict(list)
    for text in dict.fromkeys(tiled(plan, subject) for plan in plans):
        plan = Plan.parse(text)
        try:
            check(plan, graph, batch=subject.batch)
            good[plan.ranks].append(text)
        except PlanError as error:
            refused.append({"model": subject.name, "plan": text, "reason": str(error)})
    return graph, good


def tiled(plan: str, subject: Subject) -> str:
    """Return a plan as it is written for a network of images or of volumes."""
    return plan.replace("{tiles}", "x".join(["2", *["1"] * (len(subject.shape) - 2)]))


def _measured(
    subject: Subject,
    graph: Graph,
    texts: Sequence[str],
    ranks: int,
    machine: Machine,
    repeats: int,
    seconds: float,
    memory: bool,
    refused: list[dict[str, str]],
) -> tuple[list[Row], Profile, Profile]:
    """Time the computations, predict, and train, with the computations in turn once more.

    Return the rows, and the times of the computations before the steps and in turn with them.
    """
    from shardwise.oracle import Oracle
    from shardwise.oracle.profile import drift, renewed
    from shardwise.runtime.calibrate.chains import Chain, chains_of
    from shardwise.runtime.calibrate.demand import empty_profile, fresh_profile, stages_of
    from shardwise.runtime.calibrate.kernels import collect

    def chains(trials: Sequence[Trial]) -> list[Chain]:
        plans = [Plan.parse(trial.plan) for trial in trials]
        return chains_of(stages_of(graph, machine, plans, subject.batch), empty_profile(machine))[0]

    before = fresh_profile(graph, machine, [Plan.parse(t) for t in texts], subject.batch, seconds)
    oracle = Oracle(graph, machine, before)
    predicted = [oracle.predict(text, subject.batch) for text in texts]
    limit = TRIED * machine.device.memory_bytes * machine.node.devices / ranks
    sizes = [int(p.peak_bytes - machine.device.baseline_bytes) for p in predicted]
    trials = [Trial(subject, text) for text in texts]
    transport = machine.transport or "gloo"
    measured, timed = measure_trials(trials, ranks, transport, repeats, sizes, limit, memory, chains)
    meanwhile = empty_profile(machine)
    for replayed, results in timed:
        collect(meanwhile, replayed, results)
    after = renewed(before, meanwhile)
    later = Oracle(graph, machine, after)
    rows = []
    for text, p, found in zip(texts, predicted, measured, strict=True):
        if isinstance(found, str):
            refused.append({"model": subject.name, "plan": text, "reason": found})
            continue
        rows.append(
            Row(
                subject.name,
                text,
                strategy_of(Plan.parse(text)),
                ranks,
                p.step_seconds,
                found.seconds,
                found.spread,
                p.working_bytes,
                found.peak_bytes,
                p.peak_bytes,
                found.high_water_bytes,
                later.seconds(Plan.parse(text), subject.batch),
                drift(before, meanwhile),
            )
        )
    return rows, before, after


def accuracy(predicted: float, measured: float) -> float:
    """Return 1 - |predicted - measured| / measured."""
    return 1 - abs(predicted - measured) / measured if measured else 0.0


def report(rows: Sequence[Row], refused: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return rows and accuracies as plain values."""
    return {
        "rows": [asdict(row) for row in rows],
        "time_accuracy": _means(rows, lambda r: (r.predicted_seconds, r.measured_seconds)),
        "meanwhile_accuracy": _means(rows, lambda r: (r.meanwhile_seconds, r.measured_seconds)),
        "memory_accuracy": _means(rows, lambda r: (r.predicted_peak_bytes, r.measured_peak_bytes)),
        "high_water_accuracy": _means(
            rows, lambda r: (r.predicted_high_water_bytes, r.measured_high_water_bytes)
        ),
        "noise": statistics.fmean(r.measured_spread / r.measured_seconds for r in rows) if rows else 0.0,
        "ranking": _ranking(rows),
        "refused": list(refused),
    }


def _means(rows: Sequence[Row], pair: Callable[[Row], tuple[float, float]]) -> dict[str, Any]:
    """Return the mean accuracy of what was measured, of all and by strategy; None if nothing was."""
    known = [(row, accuracy(*pair(row))) for row in rows if pair(row)[1]]

    def by_strategy(pairs: Sequence[tuple[Row, float]]) -> dict[str, float]:
        groups: dict[str, list[float]] = defaultdict(list)
        for row, value in pairs:
            groups[row.strategy].append(value)
        return {name: statistics.fmean(values) for name, values in sorted(groups.items())}

    return {
        "mean": statistics.fmean(value for _, value in known) if known else None,
        "by_strategy": by_strategy(known),
        "by_ranks_and_strategy": {
            # As a text, which is what JSON makes of it anyway.
            str(ranks): by_strategy([(row, value) for row, value in known if row.ranks == ranks])
            for ranks in sorted({row.ranks for row, _ in known})
        },
    }


def _ranking(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Say for each network and number of ranks how much slower the predicted best is than the real one."""
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.model, row.ranks].append(row)
    result = []
    for (model, ranks), group in groups.items():
        ranked = sorted(group, key=lambda r: r.predicted_seconds)
        best = min(group, key=lambda r: r.measured_seconds)
        result.append(
            {
                "model": model,
                "ranks": ranks,
                "chosen": ranked[0].plan,
                "best": best.plan,
                "slower": ranked[0].measured_seconds / best.measured_seconds - 1,
                "best_in_top_two": best in ranked[:2],
            }
        )
    return result
