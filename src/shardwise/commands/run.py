"""`shardwise run`: start local ranks of a script."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from typing import Annotated

import typer


def command(
    script: Annotated[list[str], typer.Argument(help="script.py and its arguments, or -m module ...")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks to start.")] = 1,
    backend: Annotated[str | None, typer.Option(help="nccl, gloo or mpi4py; default: the best one.")] = None,
    launcher: Annotated[str | None, typer.Option(help="mpi or torchrun; default: mpi if installed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON on stdout.")] = False,
) -> None:
    """Start RANKS ranks of a script on this machine, show their output, end all when one fails."""
    from shardwise.runtime.environment import check_backend
    from shardwise.runtime.launch import Job, choose_launcher, run

    if script[0] != "-m" and not os.path.isfile(script[0]):
        raise FileNotFoundError(f"script: {script[0]!r} is not a file; expected script.py or -m module")
    if backend is not None:
        check_backend(backend)
    tell = partial(print, file=sys.stderr, flush=True)
    job = Job(ranks, tuple(script), choose_launcher(launcher, tell), backend)
    start = time.monotonic()
    code = run(job)
    if as_json:
        seconds = round(time.monotonic() - start, 3)
        print(json.dumps({"ranks": ranks, "launcher": job.launcher, "code": code, "seconds": seconds}))
    sys.exit(code)
