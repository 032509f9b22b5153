"""Run a function on forked ranks, which share the memory of the process that made them."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any


def run_ranks(function: Callable[..., Any], size: int, args: tuple[Any, ...], seconds: float) -> list[Any]:
    """Return the function's result on each rank; raise RuntimeError with what went wrong on the first."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        files = [Path(folder) / str(rank) for rank in range(size)]
        ranks = [_fork(_place(rank, size, port), function, args, files[rank]) for rank in range(size)]
        _await(ranks, time.monotonic() + seconds)
        results = []
        for rank, file in enumerate(files):
            if not file.exists():
                raise RuntimeError(f"rank {rank} was not done in {seconds:.0f} s, or died")
            ok, value = pickle.loads(file.read_bytes())
            if not ok:
                raise RuntimeError(value)
            results.append(value)
        return results


def run_alone(function: Callable[[], None]) -> None:
    """Run a function in a forked process, so that its memory goes with it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "0"
        os.waitpid(_fork({}, lambda: function(), (), file), 0)
        ok, value = pickle.loads(file.read_bytes()) if file.exists() else (False, "the process died")
        if not ok:
            raise RuntimeError(value)


def _place(rank: int, size: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {key: str(n) for key, n in names.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _fork(place: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...], file: Path) -> int:
    process = os.fork()
    if process:
        return process
    try:
        os.environ.update(place)
        answer = (True, function(*args))
    except BaseException:  # it is the parent that reports
        answer = (False, traceback.format_exc())
    part = file.with_suffix(".part")
    part.write_bytes(pickle.dumps(answer))
    part.rename(file)
    if answer[0] and place:
        from shardwise.runtime.session import finalize

        finalize()
    os._exit(0)


def _await(processes: list[int], end: float) -> None:
    left = set(processes)
    while left:
        for process in list(left):
            if os.waitpid(process, os.WNOHANG)[0]:
                left.discard(process)
        if left and time.monotonic() > end:
            for process in left:
                os.kill(process, SIGKILL)
                os.waitpid(process, 0)
            return
        time.sleep(0.02)
