"""`shardwise validate`: predicted against measured, for networks x plans, on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.commands.subject import parse_shape, sample_shape
from shardwise.commands.trials import Subject

SIZES = {
    "resnet50": Subject("resnet50", (3, 96, 96), 8),
    "resnet110v2": Subject("resnet110v2", (3, 32, 32), 16),
    "vgg16": Subject("vgg16", (3, 64, 64), 8),
    "unet": Subject("unet", (3, 64, 64), 4),
    "cosmoflow": Subject("cosmoflow-32", (4, 32, 32, 32), 4),
}
# Two tiles, whatever the number of dimensions: `{tiles}` is 2x1 for images and 2x1x1 for volumes.
PLANS = (
    *("data=2", "spatial={tiles}", "filter=2", "channel=2", "stages=2 schedule=layer"),
    *("stages=2 schedule=gpipe micro_batches=4", "stages=2 schedule=1f1b micro_batches=4"),
    "stages=2 schedule=gems-mast",
    *("data=2 filter=2", "data=2 spatial={tiles}", "stages=4 schedule=gpipe micro_batches=4"),
    "stages=4 schedule=1f1b micro_batches=4",
    "stages=4 schedule=gems-master replication=2",
    "data=2 stages=2 spatial={tiles} schedule=bidirectional micro_batches=2",
)


def command(
    models: Annotated[str, typer.Option(help="Commas between NAME[@3x96x96/BATCH].")] = ",".join(SIZES),
    plans: Annotated[str, typer.Option(help="Semicolons between plans; default: all strategies.")] = "",
    machine: Annotated[Path, typer.Option(help="What `shardwise calibrate` wrote.")] = Path("here.toml"),
    transport: Annotated[str | None, typer.Option(help="mpi4py or gloo; default: the machine's.")] = None,
    repeats: Annotated[int, typer.Option(help="Measured steps of each plan, in turn.")] = 5,
    profile_seconds: Annotated[float, typer.Option(help="Budget for kernels not measured yet.")] = 120.0,
    memory: Annotated[bool, typer.Option(help="Measure memory, in a fresh process per plan.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Train for real under every plan and report how close the predictions were."""
    from shardwise.commands.accuracy import report, rows_of
    from shardwise.commands.accuracy_table import show
    from shardwise.machine import Machine

    where = Machine.load(machine)
    if transport is not None:
        where = where.with_transport(transport)
    chosen = [text.strip() for text in plans.split(";") if text.strip()] or list(PLANS)
    rows, refused = rows_of(subjects(models.split(",")), chosen, where, repeats, profile_seconds, memory)
    found: dict[str, Any] = report(rows, refused)
    if as_json:
        print(json.dumps(found))
    else:
        show(found)


def subjects(texts: Sequence[str]) -> list[Subject]:
    """Read `resnet50`, `resnet50@3x128x128` or `resnet50@3x128x128/16`."""
    result = []
    for text in texts:
        match = re.fullmatch(r"\s*([^@]+?)(?:@([\dx]+)(?:/(\d+))?)?\s*", text)
        if match is None:
            raise ValueError(f"models: {text!r} found; write NAME, NAME@3x96x96 or NAME@3x96x96/BATCH")
        name, shape, batch = match[1], match[2], match[3]
        usual = SIZES.get(name, Subject(name, (), 8))
        sizes = parse_shape(shape) if shape else usual.shape or sample_shape(name, None)
        result.append(Subject(usual.name, sizes, int(batch) if batch else usual.batch))
    return result
