"""Put predictions beside measurements: rows, accuracy per strategy, ranking quality."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from shardwise.commands.subject import build_model, training_graph
from shardwise.commands.trials import Subject, Trial, measure_trials
from shardwise.oracle.strategies import strategy_of
from shardwise.plan import Plan, PlanError

if TYPE_CHECKING:
    from shardwise.machine import Machine


@dataclass(frozen=True)
class Row:
    """One network under one plan, predicted and measured; bytes are those of a step's own tensors."""

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


def rows_of(
    subjects: Sequence[Subject],
    plans: Sequence[str],
    machine: Machine,
    repeats: int,
    profile_seconds: float,
    memory: bool = True,
) -> tuple[list[Row], list[dict[str, str]]]:
    """Predict and measure every network under every plan; return the rows and what was refused."""
    predicted: dict[Trial, Any] = {}
    refused: list[dict[str, str]] = []
    for subject in subjects:
        good = _predictions(subject, plans, machine, profile_seconds / len(subjects), refused)
        predicted |= good
    by_ranks: dict[int, list[Trial]] = defaultdict(list)
    for trial in predicted:
        by_ranks[Plan.parse(trial.plan).ranks].append(trial)
    rows = []
    for ranks, trials in sorted(by_ranks.items()):
        sizes = [predicted[trial].peak_bytes for trial in trials]
        # Two thirds of the memory that the ranks share: the rest is for what they do not share out.
        limit = 0.66 * machine.device.memory_bytes * machine.node.devices / ranks
        measured = measure_trials(trials, ranks, machine.transport or "gloo", repeats, sizes, limit, memory)
        for trial, found in zip(trials, measured, strict=True):
            if isinstance(found, str):
                refused.append({"model": trial.subject.name, "plan": trial.plan, "reason": found})
                continue
            p = predicted[trial]
            rows.append(
                Row(
                    trial.subject.name,
                    trial.plan,
                    strategy_of(Plan.parse(trial.plan)),
                    ranks,
                    p.step_seconds,
                    found.seconds,
                    found.spread,
                    p.working_bytes,
                    found.peak_bytes,
                    p.peak_bytes,
                    found.high_water_bytes,
                )
            )
    return rows, refused


def _predictions(
    subject: Subject,
    plans: Sequence[str],
    machine: Machine,
    seconds: float,
    refused: list[dict[str, str]],
) -> dict[Trial, Any]:
    from shardwise.oracle import Oracle
    from shardwise.plan.check import check
    from shardwise.runtime.calibrate.demand import kernels_for_plans

    graph = training_graph(build_model(subject.name), subject.shape, subject.batch)
    good = []
    tiles = "x".join(["2", *["1"] * (len(subject.shape) - 2)])
    for text in (plan.replace("{tiles}", tiles) for plan in plans):
        try:
            check(Plan.parse(text), graph, batch=subject.batch)
            good.append(text)
        except PlanError as error:
            refused.append({"model": subject.name, "plan": text, "reason": str(error)})
    kernels = kernels_for_plans(graph, machine, [Plan.parse(t) for t in good], subject.batch, seconds)
    oracle = Oracle(graph, machine, kernels)
    return {Trial(subject, text): oracle.predict(text, subject.batch) for text in good}


def accuracy(predicted: float, measured: float) -> float:
    """Return 1 - |predicted - measured| / measured."""
    return 1 - abs(predicted - measured) / measured if measured else 0.0


def report(rows: Sequence[Row], refused: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return rows and accuracies as plain values."""
    times = [(r.strategy, accuracy(r.predicted_seconds, r.measured_seconds)) for r in rows]
    weighed = [r for r in rows if r.measured_peak_bytes]
    sizes = [(r.strategy, accuracy(r.predicted_peak_bytes, r.measured_peak_bytes)) for r in weighed]
    return {
        "rows": [asdict(row) for row in rows],
        "time_accuracy": _means(times),
        "memory_accuracy": _means(sizes),
        "noise": statistics.fmean(r.measured_spread / r.measured_seconds for r in rows) if rows else 0.0,
        "ranking": _ranking(rows),
        "refused": list(refused),
    }


def _means(pairs: Sequence[tuple[str, float]]) -> dict[str, Any]:
    groups: dict[str, list[float]] = defaultdict(list)
    for name, value in pairs:
        groups[name].append(value)
    return {
        "mean": statistics.fmean(value for _, value in pairs) if pairs else 0.0,
        "by_strategy": {name: statistics.fmean(values) for name, values in sorted(groups.items())},
    }


def _ranking(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Say for each network and number of ranks how much slower the predicted best is than the real one."""
    groups: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.model, row.ranks].append(row)
    result = []
    for (model, ranks), group in groups.items():
        chosen = min(group, key=lambda r: r.predicted_seconds)
        best = min(group, key=lambda r: r.measured_seconds)
        result.append(
            {
                "model": model,
                "ranks": ranks,
                "chosen": chosen.plan,
                "best": best.plan,
                "slower": chosen.measured_seconds / best.measured_seconds - 1,
            }
        )
    return result


def _percent(predicted: float, measured: float) -> str:
    return f"{100 * accuracy(predicted, measured):.1f} %" if measured else "not measured"


def show(found: Mapping[str, Any]) -> None:
    """Print the report as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    table = Table("model", "plan", "predicted", "measured", "spread", "accuracy", "memory accuracy")
    for row in found["rows"]:
        table.add_row(
            row["model"],
            row["plan"],
            f"{1e3 * row['predicted_seconds']:.1f} ms",
            f"{1e3 * row['measured_seconds']:.1f} ms",
            f"{1e3 * row['measured_spread']:.1f} ms",
            f"{100 * accuracy(row['predicted_seconds'], row['measured_seconds']):.1f} %",
            _percent(row["predicted_peak_bytes"], row["measured_peak_bytes"]),
        )
    console.print(table)
    summary = Table("strategy", "time", "memory")
    times, sizes = found["time_accuracy"], found["memory_accuracy"]
    for name, value in times["by_strategy"].items():
        size = sizes["by_strategy"].get(name)
        summary.add_row(name, f"{100 * value:.1f} %", "" if size is None else f"{100 * size:.1f} %")
    summary.add_row("mean", f"{100 * times['mean']:.1f} %", f"{100 * sizes['mean']:.1f} %")
    console.print(summary)
    console.print(f"Measurements themselves spread by {100 * found['noise']:.1f} %.")
    for row in found["ranking"]:
        console.print(
            f"{row['model']} on {row['ranks']} ranks: chose {row['chosen']}, "
            f"{100 * row['slower']:.1f} % slower than the best measured ({row['best']})."
        )
    for row in found["refused"]:
        console.print(f"refused: {row['model']} {row['plan']}: {row['reason']}")
