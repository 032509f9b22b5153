"""`shardwise plan`: rank all plans of a network on a machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from shardwise.commands.subject import build_model, parse_bytes, sample_shape, training_graph


def command(
    model: Annotated[str, typer.Argument(help="A zoo name, or module:attribute.")],
    ranks: Annotated[int, typer.Option(help="How many ranks there are.")],
    machine: Annotated[str, typer.Option(help="A preset's name or a TOML file.")] = "here.toml",
    batch: Annotated[int, typer.Option(help="Samples of the global mini-batch.")] = 32,
    sample: Annotated[str | None, typer.Option("--input", help="One sample, e.g. 3x1024x1024.")] = None,
    memory: Annotated[str | None, typer.Option(help="Limit per rank, e.g. 16GB.")] = None,
    objective: Annotated[str, typer.Option(help="time, memory or cost.")] = "time",
    keep: Annotated[int, typer.Option(help="How many plans to show.")] = 10,
    slots: Annotated[float, typer.Option(help="Copies of the weights that the optimizer keeps.")] = 1.0,
    profile_seconds: Annotated[
        float, typer.Option(help="Measure unseen layer shapes on this machine for at most so long.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Rank every way to split a network's training, best first, with reasons for the refused ones."""
    from shardwise.ask import search
    from shardwise.machine import Machine

    where = Machine.load(machine)
    graph = training_graph(build_model(model), sample_shape(model, sample), batch)
    ranking = search(
        graph,
        where,
        ranks,
        batch,
        memory=parse_bytes(memory),
        objective=objective,
        keep=keep,
        optimizer_slots=slots,
        profile_seconds=profile_seconds,
    )
    if as_json:
        print(json.dumps(to_json(ranking)))
        return
    print(ranking)
    if ranking.entries:
        print(f"Best: {ranking.best.plan}. {ranking.best.bottleneck}")
    for refused in ranking.refused[:5]:
        more = f" ({refused.count} plans)" if refused.count > 1 else ""
        print(f"refused: {refused.plan}{more}: {refused.reason}")


def to_json(ranking: Any) -> dict[str, Any]:
    """Return a ranking as plain values."""
    counts = ranking.counts
    return {
        "plans": [
            {
                "plan": str(entry.plan),
                "ranks": entry.ranks,
                "step_seconds": entry.step_seconds,
                "samples_per_second": entry.samples_per_second,
                "peak_bytes": int(entry.peak_bytes),
                "bottleneck": entry.bottleneck,
            }
            for entry in ranking.entries
        ],
        "front": [
            {"plan": str(e.plan), "step_seconds": e.step_seconds, "peak_bytes": int(e.peak_bytes)}
            for e in ranking.front
        ],
        "refused": [{"plan": r.plan, "reason": r.reason, "count": r.count} for r in ranking.refused],
        "counts": {
            "enumerated": counts.enumerated,
            "refused": counts.refused,
            "pruned": counts.pruned,
            "simulated": counts.simulated,
        },
    }
