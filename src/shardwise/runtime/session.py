"""Join the job: who we are, which backend and device, how many threads; and leave it cleanly."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shardwise.runtime import mpi
from shardwise.runtime.bell import Bell
from shardwise.runtime.environment import Place, check_backend, detect
from shardwise.runtime.errors import StalledError, TransportError
from shardwise.runtime.failure import end_job_on_exception, failed, restore_hook
from shardwise.runtime.heap import keep_memory
from shardwise.runtime.heartbeat import Heartbeat
from shardwise.runtime.mpi import library
from shardwise.runtime.neighbours import meet, threads_of
from shardwise.runtime.poller import FOREVER, OVERSUBSCRIBED, SPARE_CORES, cores
from shardwise.runtime.progress_thread import ProgressThread, wanted
from shardwise.runtime.rendezvous import keeper, open_store

DEFAULT_TIMEOUT_SECONDS = 120.0
# The hard limit of an operation that a script asks for, whatever its peers do; torch's own default. What the
# runtime itself waits for ends by the heartbeat's verdict alone.
_OPERATION_LIMIT = timedelta(minutes=30)


@dataclass(frozen=True)
class Session:
    """Describe the job this process has joined."""

    place: Place
    backend: str
    device: torch.device
    threads: int
    timeout_seconds: float
    owns_group: bool

    @property
    def rank(self) -> int:
        """Return this process's rank in the job."""
        return self.place.rank

    @property
    def size(self) -> int:
        """Return the number of ranks in the job."""
        return self.place.size


_session: Session | None = None
_heartbeat: Heartbeat | None = None
_progress_thread: ProgressThread | None = None
_at_leave: list[Callable[[], object]] = []


def init(backend: str | None = None, timeout: float | timedelta | None = None) -> Session:
    """Join the job this process was started in, or make a world of one; later calls return the same session.

    Args:
        backend: "nccl", "gloo" or "mpi4py"; by default NCCL with CUDA devices, else mpi4py when started
            by an MPI launcher, else Gloo. `SHARDWISE_BACKEND` sets another default.
        timeout: seconds without progress of a peer after which a wait ends the job; default 120, or
            `SHARDWISE_TIMEOUT`. With NCCL, whose waits nobody sees, more than 30 minutes is the limit of
            every operation too.
    """
    global _session, _heartbeat, _progress_thread
    if _session is not None:
        if backend is not None and backend != _session.backend:
            raise TransportError(
                f"init(backend={backend!r}): this process already joined with {_session.backend!r}; "
                "call finalize() first"
            )
        return _session
    place, seconds = detect(), _timeout_seconds(timeout)
    owns_group = not dist.is_initialized()
    if owns_group:
        chosen = choose_backend(backend, place)
        place, shared, store = _meet(chosen, place, seconds)
        oversubscribed = place.local_size > shared
        if chosen == mpi.BACKEND:
            poller = mpi.poller()
            poller.backoff = OVERSUBSCRIBED if oversubscribed else SPARE_CORES
            poller.bell = _hang_bell(store, place) if oversubscribed else None
            poller.tables = oversubscribed and place.local_size == place.size
    else:
        chosen = _existing(backend)
        place, shared = _meet_in_group(place)
    device = _choose_device(chosen, place)
    keep_memory(device)
    threads = _set_threads(place, shared)
    if owns_group:
        dist.init_process_group(
            chosen, store=store, rank=place.rank, world_size=place.size, timeout=_limit(chosen, seconds)
        )
    _session = Session(place, chosen, device, threads, seconds, owns_group)
    if place.size > 1:
        end_job_on_exception(place)
        _heartbeat = Heartbeat(place.rank, place.size, seconds, keeper=keeper(place, chosen))
        if chosen == mpi.BACKEND:
            poller = mpi.poller()
            poller.watch = _heartbeat
            _heartbeat.outstanding = poller.completer.oldest
            spare = wanted(shared, place.local_size, threads) and library.threaded()
            if poller.drive is not None and spare:
                _progress_thread = ProgressThread(poller.drive)
    atexit.register(finalize)
    return _session


def _limit(backend: str, seconds: float) -> timedelta:
    """Return the limit of an operation; on NCCL the only one that the runtime's own messages have."""
    return max(_OPERATION_LIMIT, timedelta(seconds=seconds)) if backend == "nccl" else _OPERATION_LIMIT


def _meet(backend: str, place: Place, seconds: float) -> tuple[Place, int, Store]:
    """Open the store, and find out in it how many cores the ranks of this node share."""
    if backend == mpi.BACKEND:
        mpi.register()
        if place.speaks_mpi:
            library.check_world(place)
    store = open_store(place, backend, seconds)
    return *meet(store, place), store


def _meet_in_group(place: Place) -> tuple[Place, int]:
    """Find out the same of a process group that somebody else made, perhaps of ranks no launcher knows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told = not place.guessed and (place.rank, place.size) == (rank, size)
    store = PrefixStore("shardwise", dist.distributed_c10d._get_default_store())
    return meet(store, replace(place, rank=rank, size=size, guessed=not told))


def _existing(asked: str | None) -> str:
    """Return the backend of the process group that somebody else made."""
    found = str(dist.get_backend())
    if found == "undefined":
        # A group made without a name has one backend for each kind of device, such as "cpu:gloo,cuda:nccl".
        of = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
        found = of["cuda" if torch.cuda.is_available() and "cuda" in of else "cpu"]
    if asked is not None and asked != found:
        raise TransportError(
            f"init(backend={asked!r}): this process already has a process group over {found!r}; "
            "leave the backend out, or call torch.distributed.destroy_process_group() first"
        )
    return found


def finalize() -> None:
    """Leave the job together with all other ranks; without effect when nothing was joined."""
    global _session, _heartbeat, _progress_thread
    if _session is None:
        return
    session, _session = _session, None
    if _progress_thread is not None:
        _progress_thread.stop()
        _progress_thread = None
    heartbeat, _heartbeat = _heartbeat, None
    atexit.unregister(finalize)
    if failed():
        # The others are being ended; waiting for them here would only delay that.
        return
    for forget in _at_leave:
        forget()
    if heartbeat is not None:
        heartbeat.leave()
    if session.owns_group and dist.is_initialized():
        if heartbeat is not None:
            _leave_together(session, heartbeat)
            heartbeat.stop()
        dist.destroy_process_group()
    if session.backend == mpi.BACKEND:
        poller = mpi.poller()
        poller.completer.stop()
        poller.watch = None
        if poller.bell is not None:
            poller.bell.close()
            poller.bell = None
    restore_hook()


def _leave_together(session: Session, heartbeat: Heartbeat) -> None:
    """Wait until every rank is done, so that nobody's messages or store vanish under another."""
    what = f"rank {session.rank}: leaving the job"
    if session.backend == mpi.BACKEND:
        try:
            mpi.poller().drain(session.timeout_seconds, what)
        except StalledError as error:
            print(f"shardwise: {error}; messages that nobody waited for are given up", file=sys.stderr)
        _barrier()
        return
    with heartbeat.waiting((), what):
        if session.backend == "nccl":
            dist.barrier()
        else:
            _barrier()


def _barrier() -> None:
    """Wait for all ranks, however long one still computes."""
    options = dist.BarrierOptions()
    options.timeout = FOREVER
    dist.distributed_c10d._get_default_group().barrier(options).wait()


def at_leave(forget: Callable[[], object]) -> None:
    """Let a cache of what belongs to the job be emptied before this process leaves it."""
    _at_leave.append(forget)


def current() -> Session:
    """Return the session of this process, or say that there is none."""
    if _session is None:
        raise TransportError("no session: call shardwise.init() first")
    return _session


def heartbeat() -> Heartbeat | None:
    """Return this rank's heartbeat; there is none in a world of one."""
    return _heartbeat


def progress(action: object = None) -> None:
    """Note what this rank does now and let outstanding messages advance; called between computations.

    `action` is a text, or a callable that returns it when somebody asks.
    """
    if _heartbeat is not None:
        _heartbeat.beat(action)
    if _session is not None and _session.backend == mpi.BACKEND:
        mpi.poller().progress()


def driver() -> Callable[[], object] | None:
    """Return what lets outstanding messages advance; None where they do so by themselves."""
    mpi_speaks = _session is not None and _session.size > 1 and _session.backend == mpi.BACKEND
    return mpi.poller().progress if mpi_speaks else None


def choose_backend(asked: str | None, place: Place) -> str:
    """Return the backend asked for, or the best one for this place."""
    name = asked or os.environ.get("SHARDWISE_BACKEND")
    if name is None:
        if torch.cuda.is_available():
            return "nccl"
        return mpi.BACKEND if place.speaks_mpi and library.installed() else "gloo"
    check_backend(name)
    if name == "nccl" and not torch.cuda.is_available():
        raise ValueError("backend: 'nccl' needs a CUDA device and none is visible; use 'gloo' or 'mpi4py'")
    return name


def _choose_device(backend: str, place: Place) -> torch.device:
    if not torch.cuda.is_available() or backend == "gloo":
        return torch.device("cpu")
    # Messages that wait on the device must not share a queue with the computations they wait for.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _set_threads(place: Place, shared: int) -> int:
    """Share this node's cores among its ranks, unless the user decided."""
    if "OMP_NUM_THREADS" not in os.environ and place.local_size > 1:
        torch.set_num_threads(threads_of(cores(), shared, place.local_size))
    return torch.get_num_threads()


def _hang_bell(store: Store, place: Place) -> Bell | None:
    """Hang up this rank's bell beside those of its node, before any message can be sent.

    Without the right to open another process's memory there is none, and waits sleep by the clock.
    """
    node = f"bells/{socket.gethostname()}"
    bell: Bell | None = None
    with contextlib.suppress(OSError):
        bell = Bell(place.rank, place.size, store.get(node).decode() if place.local_rank > 0 else None)
    if place.local_rank == 0:
        store.set(node, bell.path if bell is not None else "")
    return bell


def _timeout_seconds(timeout: float | timedelta | None) -> float:
    if timeout is None:
        text = os.environ.get("SHARDWISE_TIMEOUT", str(DEFAULT_TIMEOUT_SECONDS))
        try:
            timeout = float(text)
        except ValueError:
            raise ValueError(f"SHARDWISE_TIMEOUT: found {text!r}; expected seconds, such as 120") from None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if seconds <= 0:
        raise ValueError(f"timeout: found {seconds} s; expected more than zero")
    return seconds
