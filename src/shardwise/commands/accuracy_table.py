"""Print how close predictions were: rows, means by ranks and strategy, ranking quality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.commands.accuracy import accuracy


def _percent(share: float | None) -> str:
    """Return a share as words; a dash for what was not measured."""
    return "-" if share is None else f"{100 * share:.1f} %"


def _of(predicted: float, measured: float) -> str:
    return _percent(accuracy(predicted, measured) if measured else None)


def show(found: Mapping[str, Any]) -> None:
    """Print the report as tables."""
    console = Console(soft_wrap=True)
    table = Table(
        *("model", "plan", "predicted", "meanwhile", "measured", "spread"),
        *("accuracy", "memory accuracy", "high-water accuracy"),
    )
    for row in found["rows"]:
        table.add_row(
            row["model"],
            row["plan"],
            f"{1e3 * row['predicted_seconds']:.1f} ms",
            f"{1e3 * row['meanwhile_seconds']:.1f} ms",
            f"{1e3 * row['measured_seconds']:.1f} ms",
            f"{1e3 * row['measured_spread']:.1f} ms",
            _of(row["predicted_seconds"], row["measured_seconds"]),
            _of(row["predicted_peak_bytes"], row["measured_peak_bytes"]),
            _of(row["predicted_high_water_bytes"], row["measured_high_water_bytes"]),
        )
    console.print(table)
    console.print(_summary(found))
    console.print(
        f"Measurements themselves spread by {100 * found['noise']:.1f} %. With computations timed in turn "
        f"with the steps, predictions are right to {_percent(found['meanwhile_accuracy']['mean'])}."
    )
    for row in found["ranking"]:
        console.print(
            f"{row['model']} on {row['ranks']} ranks: chose {row['chosen']}, "
            f"{100 * row['slower']:.1f} % slower than the best measured ({row['best']}), "
            f"which is {'' if row['best_in_top_two'] else 'not '}among the best two predicted."
        )
    for row in found["refused"]:
        console.print(f"refused: {row['model']} {row['plan']}: {row['reason']}")


def _summary(found: Mapping[str, Any]) -> Table:
    """Return the mean accuracies by ranks and strategy, then those of everything."""
    table = Table("ranks", "strategy", "time", "memory", "high water")
    columns = [found[f"{name}_accuracy"] for name in ("time", "memory", "high_water")]
    for ranks, strategies in columns[0]["by_ranks_and_strategy"].items():
        for name in strategies:
            values = (column["by_ranks_and_strategy"].get(ranks, {}).get(name) for column in columns)
            table.add_row(ranks, name, *map(_percent, values))
    table.add_row("", "mean", *(_percent(column["mean"]) for column in columns))
    return table
