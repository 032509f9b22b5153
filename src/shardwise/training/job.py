"""Run a function on local ranks from a plain script or notebook, and bring rank 0's result back."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from shardwise.runtime.environment import detect
from shardwise.runtime.launch import Job, choose_launcher, run

_CALL, _RESULT = "call", "result"


def is_alone() -> bool:
    """Tell whether no launcher started this process with others."""
    return detect().size == 1


def on_ranks(
    ranks: int, function: Callable[..., Any], *args: Any, backend: str | None = None, **kwargs: Any
) -> Any:
    """Call a function on every rank of a new local job; return what rank 0 returns.

    Functions and classes of the script or notebook travel by value, so no import of it runs again.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        content = cloudpickle.dumps((list(sys.path), cloudpickle.dumps((function, args, kwargs))))
        Path(folder, _CALL).write_bytes(content)
        code = run(Job(ranks, ("-m", "shardwise.training.job", folder), choose_launcher(None), backend))
        if code:
            raise RuntimeError(f"the {ranks} local ranks ended with code {code}; see their messages above")
        return pickle.loads(Path(folder, _RESULT).read_bytes())


def main(folder: str) -> None:
    """Be one of the ranks."""
    path, call = pickle.loads(Path(folder, _CALL).read_bytes())
    sys.path[:] = list(dict.fromkeys([*path, *sys.path]))
    function, args, kwargs = pickle.loads(call)
    result = function(*args, **kwargs)
    if detect().rank == 0:
        partial = Path(folder, f"{_RESULT}.part")
        partial.write_bytes(cloudpickle.dumps(result))
        os.replace(partial, Path(folder, _RESULT))


if __name__ == "__main__":
    main(sys.argv[1])
