"""Run one measurement on ranks of its own and collect what each of them found."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardwise.runtime.calibrate.crew import ask_crew, is_leader
from shardwise.runtime.errors import TransportError
from shardwise.runtime.poller import cores
from shardwise.runtime.session import current

# A measurement watches its own clock; this only catches ranks that hang.
_GRACE_SECONDS = 120.0
_MEMBER = "shardwise.runtime.calibrate.member"


def measure(
    function: str, arguments: Any, *, size: int, transport: str, seconds: float, threads: int | None = None
) -> list[Any]:
    """Call `module:function(arguments)` on `size` ranks at once and return one result per rank.

    Args:
        function: importable, as `module:name`.
        arguments: picklable, given to every rank.
        size: number of ranks.
        transport: backend that joins them.
        seconds: what the measurement means to take; far more than that is an error.
        threads: computing threads of each rank; default: the cores shared out.

    Inside `crew` the ranks of the running job do it, with the transport and threads that they have; unless
    they are more than the cores of a node, and fewer are wanted: then these are started beside them.
    """
    if is_leader() and not (size < current().place.local_size > cores()):
        return ask_crew(function, arguments)
    launcher = "mpi" if transport == "mpi4py" else "torchrun"
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        Path(folder, "arguments").write_bytes(pickle.dumps((function, arguments)))
        options = ["-n", str(size), "--launcher", launcher, "--backend", transport]
        command = [sys.executable, "-m", "shardwise.cli", "run", *options, "-m", _MEMBER, folder]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads or max(1, cores() // size))}
        limit = seconds + _GRACE_SECONDS
        try:
            child = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            raise TransportError(
                f"{function} on {size} ranks ({transport}): no end after {limit:.0f} s"
            ) from None
        results = [Path(folder, f"result-{rank}") for rank in range(size)]
        if child.returncode or not all(path.exists() for path in results):
            said = (child.stderr or child.stdout).strip().splitlines()[-5:]
            raise TransportError(f"{function} on {size} ranks ({transport}) failed: {' | '.join(said)}")
        return [pickle.loads(path.read_bytes()) for path in results]
