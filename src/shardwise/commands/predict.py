"""`shardwise predict`: time, memory and bottleneck of one plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.commands.subject import build_model, sample_shape, training_graph


def command(
    model: Annotated[str, typer.Argument(help="A zoo name, or module:attribute.")],
    plan: Annotated[str, typer.Option(help='One line, e.g. "data=2 spatial=2x2".')] = "data=1",
    machine: Annotated[str, typer.Option(help="A preset's name or a TOML file.")] = "here.toml",
    batch: Annotated[int, typer.Option(help="Samples of the global mini-batch.")] = 32,
    sample: Annotated[str | None, typer.Option("--input", help="One sample, e.g. 3x1024x1024.")] = None,
    slots: Annotated[float, typer.Option(help="Copies of the weights that the optimizer keeps.")] = 1.0,
    profile_seconds: Annotated[
        float, typer.Option(help="Measure unseen layer shapes on this machine for at most so long.")
    ] = 0.0,
    timeline: Annotated[
        Path | None, typer.Option(help="Write what each rank does when to a file, for Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")] = False,
) -> None:
    """Predict the step time, the memory and the bottleneck of a plan, rank by rank."""
    from rich.console import Console
    from rich.table import Table

    from shardwise.ask import predict as ask
    from shardwise.machine import Machine

    graph = training_graph(build_model(model), sample_shape(model, sample), batch)
    found = ask(
        graph, plan, Machine.load(machine), batch, optimizer_slots=slots, profile_seconds=profile_seconds
    )
    if timeline is not None:
        found.save_timeline(timeline)
    if as_json:
        print(
            json.dumps(
                {
                    "plan": found.plan,
                    "step_seconds": found.step_seconds,
                    "interval": list(found.interval),
                    "samples_per_second": found.samples_per_second,
                    "peak_bytes": found.peak_bytes,
                    "verdict": found.verdict,
                    "bottleneck": found.bottleneck,
                    "breakdown": [dict(b) for b in found.breakdown],
                    "peak_bytes_by_category": [dict(m) for m in found.peak_bytes_by_category],
                    "assumed": list(found.assumed),
                    "flags": list(found.flags),
                }
            )
        )
        return
    print(found)
    categories = [name for name in found.breakdown[0] if any(rank[name] for rank in found.breakdown)]
    table = Table("rank", *categories, "memory", title="milliseconds by rank")
    for rank, (times, memory) in enumerate(
        zip(found.breakdown, found.peak_bytes_by_category * len(found.breakdown), strict=False)
    ):
        cells = [f"{1e3 * times.get(name, 0.0):.2f}" for name in categories]
        table.add_row(str(rank), *cells, f"{sum(memory.values()) / 1e9:.3g} GB")
        if rank == 15:
            break
    Console(soft_wrap=True).print(table)
