"""Start the ranks of a job on this machine, and end all of them when one fails."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from shardwise.runtime.environment import check_backend, without_place
from shardwise.runtime.errors import TransportError
from shardwise.runtime.mpi import library
from shardwise.runtime.mpi.mpiexec import Mpiexec, find_mpiexec
from shardwise.runtime.poller import cores
from shardwise.runtime.relay import Ended, Relay
from shardwise.runtime.worker import ADDRESS

LAUNCHERS = ("mpi", "torchrun")
_GRACE_SECONDS = 3.0
# The kernel takes 107 bytes for the name of a socket; the folder and the socket in it need 26 of them.
_ROOT_BYTES = 80
_LEAVE_SECONDS = 20.0
# How long to wait for the news of a killed rank when another has failed.
_CAUSE_SECONDS = 0.5
# What Open MPI is not to ask for nodes: the schedulers.
_FOREIGN_NODES = "^slurm,tm,pbs,lsf,gridengine,alps,flux"


@dataclass(frozen=True)
class Job:
    """Describe what to start: how many ranks, of what, by which launcher."""

    size: int
    command: tuple[str, ...]
    launcher: str
    backend: str | None = None


def choose_launcher(asked: str | None, tell: Callable[[str], object] | None = None) -> str:
    """Return the launcher asked for, or MPI where it is installed, else processes as torchrun makes them.

    `tell` is given the reason why an MPI that is installed cannot be used.
    """
    if asked is None:
        reason = _why_not_mpi() if library.installed() else ""
        if reason and tell is not None:
            tell(
                f"shardwise: {reason}. The ranks are started as torchrun does, and talk through Gloo or NCCL."
            )
        return "mpi" if reason is None else "torchrun"
    if asked not in LAUNCHERS:
        raise ValueError(f"launcher: found {asked!r}; expected one of {', '.join(LAUNCHERS)}")
    return asked


def _why_not_mpi() -> str | None:
    """Return why there is no launcher for the MPI that mpi4py loads, or None."""
    try:
        find_mpiexec()
    except TransportError as error:
        return str(error)
    return None


def run(job: Job) -> int:
    """Run a job to its end and return its exit code: zero only when every rank succeeded."""
    if job.size < 1:
        raise ValueError(f"ranks: found {job.size}; expected at least 1")
    if job.backend is not None:
        check_backend(job.backend)
    if job.launcher == "torchrun" and job.backend == "mpi4py":
        raise ValueError("backend 'mpi4py' needs the launcher 'mpi'; torchrun starts no MPI world")
    with tempfile.TemporaryDirectory(prefix="shardwise-", dir=short_root()) as folder:
        return _Run(job, os.path.join(folder, "socket")).finish()


def short_root() -> str | None:
    """Return where a folder with a socket can be: the usual place (None), unless its name is too long."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(usual)) > _ROOT_BYTES else None


def environment(job: Job, address: str) -> dict[str, str]:
    """Return the environment of every rank."""
    made = without_place(os.environ)
    made.setdefault("OMP_NUM_THREADS", str(max(1, cores() // job.size)))
    # A rank's lines must appear when they are printed, although its output is no terminal.
    made["PYTHONUNBUFFERED"] = "1"
    made[ADDRESS] = address
    if job.backend is not None:
        made["SHARDWISE_BACKEND"] = job.backend
    return made


def mpi_command(mpiexec: Mpiexec, size: int) -> tuple[list[str], dict[str, str]]:
    """Return how to start ranks with an MPI on this host, even as root and with more ranks than cores.

    Inside an allocation of several nodes an MPI would spread them over all, with its scheduler's help.
    """
    command = [mpiexec.path, "-n", str(size)]
    if mpiexec.vendor != "Open MPI":
        return [*command, "-launcher", "fork", "-hosts", "localhost"], {}
    extra = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Version 5 reads the variables of its launcher, PRRTE.
    extra |= {f"{prefix}_MCA_ras": _FOREIGN_NODES for prefix in ("OMPI", "PRTE")}
    return [*command, "--host", f"localhost:{size}", "--oversubscribe", "--bind-to", "none"], extra


class _Run:
    """Hold the processes of a running job."""

    def __init__(self, job: Job, address: str) -> None:
        self._job, self._address = job, address
        self._events: queue.SimpleQueue[Ended | int] = queue.SimpleQueue()
        self._relay = Relay(address, job.size, self._events.put)
        self._store: Any = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        base = environment(job, address)
        worker = [sys.executable, "-m", "shardwise.runtime.worker", *job.command]
        if job.launcher == "mpi":
            command, extra = mpi_command(find_mpiexec(), job.size)
            self._start([*command, *worker], base | extra)
        else:
            for own in self._torchrun_environments():
                self._start(worker, base | own)

    def _start(self, command: Sequence[str], env: dict[str, str]) -> None:
        # Own sessions: Ctrl-C reaches the launcher alone, which then ends the ranks in order.
        self._processes.append(
            subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
        )

    def _torchrun_environments(self) -> list[dict[str, str]]:
        """Return the variables torchrun would set, with the store served by this process."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore("127.0.0.1", 0, self._job.size, True, wait_for_workers=False)
        size = str(self._job.size)
        return [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            for rank in range(self._job.size)
        ]

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._events.put(number)

    def finish(self) -> int:
        """Wait until all ranks are done or one failed, end what is left, and return the code."""
        code = 1
        try:
            code = self._watch()
        finally:
            # Ranks that succeeded are only taking down their interpreters, which a busy machine makes slow.
            self._end_all(_LEAVE_SECONDS if code == 0 else 1.0)
            self._relay.close()
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        return code

    def _watch(self) -> int:
        done = 0
        while done < self._job.size:
            event = self._next()
            if event is None:
                return self._without_word()
            if isinstance(event, int):
                self._relay.say(f"{signal.Signals(event).name}: ending {self._job.size} ranks")
                self._signal_ranks(event)
                return 128 + event
            if event.code != 0:
                return self._failure(self._cause(event))
            done += 1
        return 0

    def _next(self) -> Ended | int | None:
        """Return what happens next, or None when the processes have ended and no rank has a word to say.

        The end of a process is seen at once; the word of its rank may still be on its way.
        """
        while True:
            over = self._over()
            try:
                return self._events.get(timeout=_CAUSE_SECONDS if over else 0.1)
            except queue.Empty:
                if over:
                    return None

    def _over(self) -> bool:
        """Tell whether a process that this one started has failed, or all have ended."""
        codes = [process.poll() for process in self._processes]
        return any(codes) or None not in codes

    def _cause(self, first: Ended) -> Ended:
        """Return the rank that a signal ended, if one did just then: others fail for the want of it.

        The word of a rank that failed may arrive before the end of the one that was killed is seen. Under
        MPI the launcher kills the others of a failed rank, so there the first to end is the one to name.
        """
        if first.code is None or self._job.launcher == "mpi":
            return first
        end = time.monotonic() + _CAUSE_SECONDS
        with contextlib.suppress(queue.Empty):
            while True:
                later = self._events.get(timeout=max(0.0, end - time.monotonic()))
                if isinstance(later, int):
                    self._events.put(later)
                    return first
                if later.code is None:
                    return later
        return first

    def _without_word(self) -> int:
        """Return the code of processes that ended before or without their ranks' reports."""
        bad = [process.returncode for process in self._processes if process.returncode]
        if bad:
            self._relay.say(f"a launcher process ended with code {bad[0]}; ending all ranks")
            return _exit_code(bad[0])
        return 0 if self._relay.pids else 1

    def _failure(self, ended: Ended) -> int:
        others = self._job.size - 1
        if ended.code is not None:
            how, code = f"failed with code {ended.code}", ended.code
        else:
            number = self._signal_of(ended)
            name = signal.Signals(number).name if number else "a signal"
            how, code = f"was killed by {name}", 128 + (number or signal.SIGKILL)
        self._relay.say(f"rank {ended.rank} (process {ended.pid}) {how}; ending the other {others}")
        return code

    def _signal_of(self, ended: Ended) -> int | None:
        """Return the signal that ended a rank this process started itself."""
        for process in self._processes:
            if process.pid == ended.pid:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=1)
                    return -code if code < 0 else None
        return None

    def _signal_ranks(self, number: int) -> None:
        for pid in self._relay.pids.values():
            self._signal_rank(pid, number)
        self._await(_GRACE_SECONDS)

    def _signal_rank(self, pid: int, number: int) -> None:
        """Signal a rank, unless it has ended: its number may by now be that of anybody's process."""
        if is_rank(pid, self._address):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _await(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in self._processes):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def _end_all(self, patience_seconds: float) -> None:
        """Let finished launchers go, then end what is left, gently first."""
        self._await(patience_seconds)
        for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
            if self._await(0.0):
                break
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            self._await(seconds)
        # An MPI launcher puts ranks into sessions of their own, so the group's signal may miss them.
        for pid in self._relay.pids.values():
            self._signal_rank(pid, signal.SIGKILL)


def is_rank(pid: int, address: str) -> bool:
    """Tell whether a process belongs to the job whose ranks print to the given address, as only they know."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as variables:
            return os.fsencode(f"{ADDRESS}={address}") in variables.read().split(b"\0")
    except OSError:
        return False


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code
