"""`shardwise limits`: how far each strategy scales and what stops it."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from shardwise.commands.subject import build_model, sample_shape, training_graph


def command(
    model: Annotated[str, typer.Argument(help="A zoo name, or module:attribute.")],
    batch: Annotated[int, typer.Option(help="Samples of the global mini-batch.")] = 32,
    sample: Annotated[str | None, typer.Option("--input", help="One sample, e.g. 3x1024x1024.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print ParaDL's table for a network: the most ranks of every strategy, its limits and bottlenecks."""
    from rich.console import Console
    from rich.table import Table

    from shardwise.oracle.limits import limits

    rows = limits(training_graph(build_model(model), sample_shape(model, sample), batch), batch)
    if as_json:
        print(json.dumps({"limits": [dataclasses.asdict(row) for row in rows]}))
        return
    table = Table("strategy", "at most", "decided by", "limits", "bottlenecks")
    for row in rows:
        hinders = (", ".join(row.limits), ", ".join(row.bottlenecks))
        table.add_row(row.strategy, str(row.max_ranks), row.decided_by, *hinders)
    Console().print(table)
