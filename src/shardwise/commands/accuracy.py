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
    from shardwise.graph import Graph
    from shardwise.machine import Machine


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
) -> tuple[list[Row], list[dict[str, str]]]:
    """Predict and measure every network under every plan; return the rows and what was refused."""
    refused: list[dict[str, str]] = []
    parts = [(subject, *_good(subject, plans, refused)) for subject in subjects]
    share = profile_seconds / max(1, sum(len(by_ranks) for _, _, by_ranks in parts))
    rows = []
    for subject, graph, by_ranks in parts:
        for ranks, texts in sorted(by_ranks.items()):
            rows += _measured(subject, graph, texts, ranks, machine, repeats, share, memory, refused)
    return rows, refused


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
) -> list[Row]:
    """Time the computations, predict, and train, with the computations in turn once more."""
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
    # Two thirds of the memory that the ranks share: the rest is for what they do not share out.
    limit = 0.66 * machine.device.memory_bytes * machine.node.devices / ranks
    # The computations on their own have weights, gradients and activations too.
    sizes = [2 * p.peak_bytes for p in predicted]
    trials = [Trial(subject, text) for text in texts]
    transport = machine.transport or "gloo"
    measured, timed = measure_trials(trials, ranks, transport, repeats, sizes, limit, memory, chains)
    meanwhile = empty_profile(machine)
    for replayed, results in timed:
        collect(meanwhile, replayed, results)
    later = Oracle(graph, machine, renewed(before, meanwhile))
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
    return rows


def accuracy(predicted: float, measured: float) -> float:
    """Return 1 - |predicted - measured| / measured."""
    return 1 - abs(predicted - measured) / measured if measured else 0.0


def report(rows: Sequence[Row], refused: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return rows and accuracies as plain values."""
    times = [(r.strategy, accuracy(r.predicted_seconds, r.measured_seconds)) for r in rows]
    meanwhile = [(r.strategy, accuracy(r.meanwhile_seconds, r.measured_seconds)) for r in rows]
    weighed = [r for r in rows if r.measured_peak_bytes]
    sizes = [(r.strategy, accuracy(r.predicted_peak_bytes, r.measured_peak_bytes)) for r in weighed]
    return {
        "rows": [asdict(row) for row in rows],
        "time_accuracy": _means(times),
        "meanwhile_accuracy": _means(meanwhile),
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
    table = Table(
        "model", "plan", "predicted", "meanwhile", "measured", "spread", "accuracy", "memory accuracy"
    )
    for row in found["rows"]:
        table.add_row(
            row["model"],
            row["plan"],
            f"{1e3 * row['predicted_seconds']:.1f} ms",
            f"{1e3 * row['meanwhile_seconds']:.1f} ms",
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
    console.print(
        f"Measurements themselves spread by {100 * found['noise']:.1f} %. With computations timed in turn "
        f"with the steps, predictions are right to {100 * found['meanwhile_accuracy']['mean']:.1f} %."
    )
    for row in found["ranking"]:
        console.print(
            f"{row['model']} on {row['ranks']} ranks: chose {row['chosen']}, "
            f"{100 * row['slower']:.1f} % slower than the best measured ({row['best']})."
        )
    for row in found["refused"]:
        console.print(f"refused: {row['model']} {row['plan']}: {row['reason']}")
