"""Persistent pools of ranks for tests: start the processes once, then run many functions on them.

    from ranks import run_ranks

    def worker(shape):                       # importable, at the top level of a test module
        tensor = torch.ones(shape)
        dist.all_reduce(tensor)
        return tensor

    results = run_ranks(worker, size=3, transport="mpi4py", args=((2, 2),))   # one result per rank

A pool of each (size, transport) starts when first used and ends with the pytest session. A case that
fails or exceeds its deadline takes its pool with it; the next case starts a fresh one. An idle rank
sleeps on its socket.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

TRANSPORTS = ("gloo", "mpi4py")
_START_SECONDS = 60.0
_TESTS = Path(__file__).resolve().parent


class RankError(AssertionError):
    """Carries the traceback texts of the ranks that failed, or says which ones hang or died."""


class Pool:
    """A set of rank processes that run functions on request."""

    def __init__(self, size: int, transport: str) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"transport: found {transport!r}; expected one of {TRANSPORTS}")
        self.size, self.transport = size, transport
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._store: Any = None

    def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], deadline: float
    ) -> list[Any]:
        """Run a function on every rank and return one result per rank."""
        if not self._connections:
            self._start()
        module = sys.modules[fn.__module__]
        payload = pickle.dumps(
            (module.__name__, module.__file__, fn.__qualname__, pickle.dumps((args, kwargs)))
        )
        try:
            for connection in self._connections:
                connection.send_bytes(payload)
            answers = self._collect(fn.__qualname__, time.monotonic() + deadline, deadline)
        except BaseException:
            self.kill()
            raise
        failures = [f"--- rank {rank}\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.kill()
            raise RankError(
                f"{fn.__qualname__} on {self.size} ranks ({self.transport}):\n" + "\n".join(failures)
            )
        return [value for _, value in answers]

    def _collect(self, name: str, end: float, deadline: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        rank_of = {id(connection): rank for rank, connection in enumerate(self._connections)}
        # Once a rank has failed, others may wait for it forever: give them little time to add their word.
        while len(answers) < self.size:
            pending = [c for rank, c in enumerate(self._connections) if rank not in answers]
            ready = wait(pending, max(0.0, end - time.monotonic()))
            if not ready:
                missing = [rank for rank in range(self.size) if rank not in answers]
                failed = [f"--- rank {r}\n{text}" for r, (ok, text) in answers.items() if not ok]
                what = "\n".join(failed) or "no rank failed"
                raise RankError(f"{name}: ranks {missing} did not finish within {deadline:.0f} s\n{what}")
            for connection in ready:
                rank = rank_of[id(connection)]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    answers[rank] = (False, "the process died")
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + 2.0)
        return [answers[rank] for rank in range(self.size)]

    def _start(self) -> None:
        key = secrets.token_bytes(16)
        with tempfile.TemporaryDirectory(prefix="ranks") as folder:
            address = os.path.join(folder, "s")
            environment = os.environ | {
                "RANKS_ADDRESS": address,
                "RANKS_KEY": key.hex(),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")]),
            }
            with Listener(address, "AF_UNIX", backlog=self.size, authkey=key) as listener:
                if self.transport == "gloo":
                    self._spawn_gloo(environment)
                else:
                    self._spawn_mpi(environment)
                self._accept(listener)

    def _command(self) -> list[str]:
        return [sys.executable, str(_TESTS / "rank_worker.py"), self.transport]

    def _spawn_mpi(self, environment: dict[str, str]) -> None:
        from shardwise.runtime.mpi.mpiexec import find_mpiexec

        command = [find_mpiexec().path, "-n", str(self.size), *self._command()]
        self._processes = [_popen(command, environment)]

    def _spawn_gloo(self, environment: dict[str, str]) -> None:
        import torch.distributed as dist

        # The pool serves the store, so that no free port has to be guessed.
        self._store = dist.TCPStore("127.0.0.1", 0, self.size, True, wait_for_workers=False)
        for rank in range(self.size):
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            self._processes.append(_popen(self._command(), environment | own))

    def _accept(self, listener: Listener) -> None:
        # Python offers no timeout on accept; the socket underneath has one.
        listener._listener._socket.settimeout(0.2)  # type: ignore[attr-defined]
        end = time.monotonic() + _START_SECONDS
        accepted: dict[int, tuple[Connection, int]] = {}
        try:
            while len(accepted) < self.size:
                try:
                    connection = listener.accept()
                except TimeoutError:
                    if time.monotonic() > end or any(process.poll() for process in self._processes):
                        raise
                    continue
                rank, pid = connection.recv()
                accepted[rank] = (connection, pid)
        except (TimeoutError, EOFError) as error:
            self._pids = [pid for _, pid in accepted.values()]
            self.kill()
            raise RankError(
                f"only ranks {sorted(accepted)} of {self.size} started ({self.transport})"
            ) from error
        self._connections = [accepted[rank][0] for rank in range(self.size)]
        self._pids = [accepted[rank][1] for rank in range(self.size)]

    def kill(self) -> None:
        """End all ranks at once; the next run starts new ones."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._pids, self._store = [], [], [], None


def _popen(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # Their own session, so that one signal reaches launcher, proxies and ranks, and Ctrl-C only us.
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


@cache
def pool(size: int, transport: str) -> Pool:
    """Return the session's pool of this size and transport; it starts at its first case."""
    made = Pool(size, transport)
    atexit.register(made.kill)
    return made


def run_ranks(
    fn: Callable[..., Any],
    size: int = 2,
    transport: str = "mpi4py",
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    deadline: float = 60.0,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on every rank of a pool and return the results by rank.

    The function is found again by its module's file and its name in each rank; arguments and results are
    pickled. What a rank raises is raised here as `RankError` with its traceback.
    """
    return pool(size, transport).run(fn, args, kwargs or {}, deadline)
