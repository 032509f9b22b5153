"""Open the key-value store in which the ranks of a job find each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from shardwise.runtime.environment import Place, first_host
from shardwise.runtime.errors import TransportError
from shardwise.runtime.mpi import library

_JOIN_SECONDS = 300.0
_BY_MPI = "mpi4py"


def open_store(place: Place, backend: str, timeout_seconds: float = 0.0) -> Store:
    """Return a store all ranks of the job share; a timeout longer than the usual holds for joining too."""
    limit = timedelta(seconds=max(_JOIN_SECONDS, timeout_seconds))
    if place.size == 1:
        return HashStore()
    if _over_mpi(place, backend):
        return _through_mpi(place, limit)
    if _addressed():
        return _from_environment(place, limit)
    if _in_step(place):
        host = first_host(os.environ["SLURM_STEP_NODELIST"])
        return TCPStore(host, step_port(os.environ), place.size, place.rank == 0, limit)
    raise TransportError(
        f"backend {backend!r} started by {place.launcher}: the ranks cannot find each other; set MASTER_ADDR "
        "and MASTER_PORT, install mpi4py, or start with `shardwise run -n N script.py`"
    )


def keeper(place: Place, backend: str) -> str:
    """Return who serves the store of a job, for messages to the user."""
    return "the launcher" if _served() and not _over_mpi(place, backend) else "rank 0"


def step_port(environ: Mapping[str, str]) -> int:
    """Return a port on which all ranks of a Slurm step agree without talking, each step on one of its own."""
    job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    # Below the ports that systems give to outgoing connections; the prime keeps jobs with near numbers apart.
    return 20000 + (101 * job + step) % 12000


def _over_mpi(place: Place, backend: str) -> bool:
    """Tell whether the ranks meet through MPI: other backends do so only where nothing else tells them how.

    The MPI that mpi4py loads may not be the launcher's, and Gloo and NCCL do not need it to be.
    """
    if not place.speaks_mpi or not library.installed():
        return False
    return backend == _BY_MPI or not (_addressed() or _in_step(place))


def _addressed() -> bool:
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ


def _in_step(place: Place) -> bool:
    return place.launcher == "srun" and "SLURM_STEP_NODELIST" in os.environ


def _served() -> bool:
    """Tell whether the launcher serves the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _through_mpi(place: Place, limit: timedelta) -> Store:
    """Let rank 0 take any free port and tell the others through MPI."""
    library.check_world(place)
    mpi = library.load()
    store: TCPStore | None = None
    message = bytearray(256)
    if place.rank == 0:
        one_node = place.local_size == place.size and not place.guessed
        host = "127.0.0.1" if one_node else socket.gethostname()
        store = TCPStore(host, 0, place.size, True, limit, wait_for_workers=False)
        text = f"{host} {store.port}".encode()
        message[: len(text)] = text
    from shardwise.runtime.mpi.registration import poller

    request = mpi.COMM_WORLD.Ibcast([message, len(message), mpi.BYTE], 0)
    poller().wait(request, limit.total_seconds(), f"rank {place.rank}: joining the job, peer rank 0")
    if store is not None:
        return store
    host, port = bytes(message).rstrip(b"\0").decode().split()
    return TCPStore(host, int(port), place.size, False, limit)


def _from_environment(place: Place, limit: timedelta) -> Store:
    """Join at MASTER_ADDR:MASTER_PORT, where the launcher itself may already serve the store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, place.size, place.rank == 0 and not _served(), limit)
    # A restarted job must not read what its predecessor left in the launcher's store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"shardwise/{attempt}", store)
