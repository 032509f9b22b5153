"""End the whole job, readably, when one rank raises."""

from __future__ import annotations

import os
import sys
import time
import traceback
from types import TracebackType

from shardwise.runtime.environment import Place
from shardwise.runtime.mpi import library

_FORWARDING_SECONDS = 0.3

_failed = False
_previous_hook = sys.excepthook


def failed() -> bool:
    """Return whether this rank ended with an exception."""
    return _failed


def mark_failed() -> None:
    """Note that this rank failed, so that leaving the job does not wait for the others."""
    global _failed
    _failed = True


def end_job_on_exception(place: Place) -> None:
    """From now on let an uncaught exception on this rank end all ranks."""
    global _previous_hook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        mark_failed()
        text = "".join(traceback.format_exception(kind, error, trace))
        summary = f"shardwise: rank {place.rank} of {place.size} ends the job: {kind.__name__}: {error}"
        print(f"{text}{summary}", file=sys.stderr, flush=True)
        end_job(1)

    _previous_hook = sys.excepthook
    sys.excepthook = hook


def restore_hook() -> None:
    """Handle exceptions again as before `end_job_on_exception`."""
    sys.excepthook = _previous_hook


def end_job(code: int) -> None:
    """End all ranks: MPI aborts the job at once; elsewhere the launcher sees this rank's code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if library.loaded():
        # An aborting MPI launcher drops what it has not forwarded yet, which would be the message.
        time.sleep(_FORWARDING_SECONDS)
        library.load().COMM_WORLD.Abort(code)
    os._exit(code)
