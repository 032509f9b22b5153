"""`shardwise scaling`: every strategy on more and more ranks."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from shardwise.commands.subject import build_model, parse_bytes, sample_shape, training_graph


def command(
    model: Annotated[str, typer.Argument(help="A zoo name, or module:attribute.")],
    ranks: Annotated[
        int, typer.Option(help="The most ranks; powers of two (beyond 64: of four) are shown.")
    ] = 1024,
    machine: Annotated[str, typer.Option(help="A preset's name or a TOML file.")] = "here.toml",
    batch: Annotated[int, typer.Option(help="Samples of the mini-batch; with --weak, of each rank.")] = 32,
    sample: Annotated[str | None, typer.Option("--input", help="One sample, e.g. 3x1024x1024.")] = None,
    weak: Annotated[bool, typer.Option(help="Let the mini-batch grow with the ranks.")] = False,
    strategies: Annotated[str, typer.Option(help="Commas between strategies; default: all.")] = "",
    memory: Annotated[str | None, typer.Option(help="Limit per rank, e.g. 16GB.")] = None,
    slots: Annotated[float, typer.Option(help="Copies of the weights that the optimizer keeps.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print the step time and the efficiency of every strategy's best plan over the number of ranks."""
    from shardwise.ask import profiled
    from shardwise.machine import Machine
    from shardwise.oracle.scaling import scaling
    from shardwise.oracle.strategies import STRATEGIES

    if ranks < 1:
        raise ValueError(f"ranks: {ranks} found; at least 1")
    stride = 1 if ranks <= 64 else 2
    counts = sorted({1 << k for k in range(0, ranks.bit_length(), stride)} | {ranks})
    where = Machine.load(machine)
    graph = training_graph(build_model(model), sample_shape(model, sample), batch)
    found = scaling(
        graph,
        where,
        counts,
        batch,
        weak=weak,
        strategies=[name.strip() for name in strategies.split(",") if name.strip()] or STRATEGIES,
        memory=parse_bytes(memory),
        kernels=profiled(graph, where, (), batch, 0.0),
        optimizer_slots=slots,
    )
    if as_json:
        points = [dataclasses.asdict(point) for point in found.points]
        print(json.dumps({"machine": found.machine, "weak": weak, "points": points}))
    else:
        print(found)
