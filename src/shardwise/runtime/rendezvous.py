"""Open the key-value store in which the ranks of a job find each other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from shardwise.runtime.environment import Place, first_host
from shardwise.runtime.errors import TransportError
from shardwise.runtime.mpi import library

_JOIN_LIMIT = timedelta(seconds=300)


def open_store(place: Place, backend: str) -> Store:
    """Return a store all ranks of the job share."""
    if place.size == 1:
        return HashStore()
    if place.speaks_mpi and library.installed():
        return _over_mpi(place)
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return _from_environment(place)
    if place.launcher == "srun" and "SLURM_STEP_NODELIST" in os.environ:
        host = first_host(os.environ["SLURM_STEP_NODELIST"])
        # Jobs that share a node need different ports, and all ranks of one must agree without talking.
        port = 20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 20000
        return TCPStore(host, port, place.size, place.rank == 0, _JOIN_LIMIT)
    raise TransportError(
        f"backend {backend!r} started by {place.launcher}: the ranks cannot find each other; set MASTER_ADDR "
        "and MASTER_PORT, install mpi4py, or start with `shardwise run -n N script.py`"
    )


def keeper(place: Place) -> str:
    """Return who serves the store of a job, for messages to the user."""
    over_mpi = place.speaks_mpi and library.installed()
    return "the launcher" if _served() and not over_mpi else "rank 0"


def _served() -> bool:
    """Tell whether the launcher serves the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _over_mpi(place: Place) -> Store:
    """Let rank 0 take any free port and tell the others through MPI."""
    library.check_world(place)
    mpi = library.load()
    store: TCPStore | None = None
    message = bytearray(256)
    if place.rank == 0:
        one_node = place.local_size == place.size and not place.guessed
        host = "127.0.0.1" if one_node else socket.gethostname()
        store = TCPStore(host, 0, place.size, True, _JOIN_LIMIT, wait_for_workers=False)
        text = f"{host} {store.port}".encode()
        message[: len(text)] = text
    from shardwise.runtime.mpi.registration import poller

    request = mpi.COMM_WORLD.Ibcast([message, len(message), mpi.BYTE], 0)
    poller().wait(request, _JOIN_LIMIT.total_seconds(), f"rank {place.rank}: joining the job, peer rank 0")
    if store is not None:
        return store
    host, port = bytes(message).rstrip(b"\0").decode().split()
    return TCPStore(host, int(port), place.size, False, _JOIN_LIMIT)


def _from_environment(place: Place) -> Store:
    """Join at MASTER_ADDR:MASTER_PORT, where the launcher itself may already serve the store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, place.size, place.rank == 0 and not _served(), _JOIN_LIMIT)
    # A restarted job must not read what its predecessor left in the launcher's store.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"shardwise/{attempt}", store)
