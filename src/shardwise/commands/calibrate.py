"""`shardwise calibrate`: measure this machine and write it to a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    output: Annotated[Path, typer.Option("-o", "--output", help="TOML file to write.")] = Path("here.toml"),
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 120.0,
    transport: Annotated[
        list[str] | None, typer.Option(help="mpi4py or gloo, may be given twice; default: what is there.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks on this node; default: one per core.")] = None,
    name: Annotated[str, typer.Option(help="Name of the machine in the file.")] = "here",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of words.")] = False,
) -> None:
    """Measure computing, memory and messages of this machine with all its cores busy."""
    from shardwise.runtime.calibrate import calibrate

    machine = calibrate(output, seconds, transport, ranks=ranks, name=name, quiet=as_json)
    if as_json:
        print(json.dumps({"output": str(output), "machine": dataclasses.asdict(machine)}))
    else:
        print(machine)
        print(f"written to {output}; use it with --machine {output}")
