"""Run a user's script as one rank under `shardwise run`."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import socket
import sys
import threading
import traceback
from types import TracebackType

from shardwise.runtime.environment import Place, detect
from shardwise.runtime.failure import end_job, mark_failed

ADDRESS = "SHARDWISE_OUTPUT"


def main(arguments: list[str]) -> None:
    """Connect to the launcher, run the script or `-m module`, and report how it ended."""
    place = detect()
    life = _connect(place.rank)
    # First registered, last run: only after MPI and all other exit handlers is this rank truly done.
    atexit.register(_report, life)
    code = _run(arguments, place)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        life.sendall(b"%d\n" % code)
        end_job(code)


def _report(life: socket.socket) -> None:
    with contextlib.suppress(OSError):
        life.sendall(b"0\n")


def _run(arguments: list[str], place: Place) -> int:
    as_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if as_module else arguments
    sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.abspath(arguments[0]))
    try:
        if as_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = _code(end)
        if code:
            print(f"shardwise: rank {place.rank} of {place.size} exits with code {code}", file=sys.stderr)
        return code
    except BaseException as error:
        mark_failed()
        traceback.print_exception(error.with_traceback(_from_script(error.__traceback__)))
        summary = f"{type(error).__name__}: {error}"
        print(f"shardwise: rank {place.rank} of {place.size} ends the job: {summary}", file=sys.stderr)
        return 1
    return 0


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames between this module and the user's script."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def _code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _connect(rank: int) -> socket.socket:
    address = os.environ[ADDRESS]
    for kind, descriptor in (("out", 1), ("err", 2)):
        with _open(address, kind, rank) as stream:
            os.dup2(stream.fileno(), descriptor)
    life = _open(address, "life", rank)
    threading.Thread(target=_end_with_launcher, args=(life,), daemon=True).start()
    return life


def _open(address: str, kind: str, rank: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    connection.sendall(json.dumps({"kind": kind, "rank": rank, "pid": os.getpid()}).encode() + b"\n")
    return connection


def _end_with_launcher(life: socket.socket) -> None:
    """End when the launcher is gone: it never sends, so only its end wakes this thread."""
    with contextlib.suppress(OSError):
        life.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
