"""Register the backend with torch and build its groups."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from shardwise.runtime.environment import detect
from shardwise.runtime.errors import TransportError
from shardwise.runtime.mpi.library import load
from shardwise.runtime.poller import FOREVER, OVERSUBSCRIBED, SPARE_CORES, Poller, cores

BACKEND = "mpi4py"


@cache
def register() -> None:
    """Make `backend="mpi4py"` known to torch.distributed; MPI itself is not loaded yet."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


@cache
def poller() -> Poller:
    """Return the one poller of this process; `init` corrects its pace when it knows who shares the cores."""
    backoff = OVERSUBSCRIBED if detect().local_size > cores() else SPARE_CORES
    return Poller(backoff, drive=load().COMM_SELF.Iprobe)


def group_comm(group: dist.ProcessGroup | None = None) -> Any:
    """Return the MPI communicator for the runtime's own messages within a group.

    Its ranks are the group's; its tags are apart from those of `torch.distributed` calls.
    """
    from shardwise.runtime.mpi.group import MPIGroup

    group = group if group is not None else dist.group.WORLD
    if not isinstance(group, MPIGroup):
        raise TypeError(f"group_comm: expected a group of backend {BACKEND!r}, found {type(group).__name__}")
    return group.direct


def _create(options: Any, _: Any) -> dist.ProcessGroup:
    """Build a group: a duplicate of the world, or a communicator of the members alone."""
    from shardwise.runtime.mpi.group import MPIGroup

    mpi = load()
    world = mpi.COMM_WORLD
    timeout: timedelta = options.timeout
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    is_world = not options.global_ranks_in_group
    if is_world and (options.group_rank, options.group_size) != (world.Get_rank(), world.Get_size()):
        raise TransportError(
            f"backend {BACKEND!r}: torch.distributed was told rank {options.group_rank} of "
            f"{options.group_size}, MPI says rank {world.Get_rank()} of {world.Get_size()}; start the script "
            "with the mpiexec of the MPI that mpi4py loaded, or with `shardwise run`"
        )
    _arrive(options.store, members, timeout)
    if is_world:
        comm = world.Dup()
    else:
        subset = world.Get_group().Incl(members)
        comm = world.Create_group(subset, tag=0)
        subset.Free()
    return MPIGroup(comm, comm.Dup(), members, timeout, options.group_id or "world", poller())


def _arrive(store: Store, members: list[int], timeout: timedelta) -> None:
    """Wait in the store for all members, because MPI creates communicators in a spin without deadline."""
    # A store outlives its groups: the same name may be used again after destroy_process_group.
    arrival = store.add("arrived", 1)
    everyone = f"all/{(arrival - 1) // len(members)}"
    if arrival % len(members) == 0:
        store.set(everyone, "1")
    me = load().COMM_WORLD.Get_rank()
    watch = poller().watch
    limit = timeout
    if watch is not None:
        # Who gave no limit of its own leaves it to the heartbeat.
        limit = FOREVER if timeout == default_pg_timeout else timeout
        others = [rank for rank in members if rank != me]
        watch.begin_wait(others, f"rank {me}: new group of ranks {members}", polled=False)
    try:
        store.wait([everyone], limit)
    except dist.DistStoreError as error:
        raise TransportError(
            f"new group of ranks {members}: {store.add('arrived', 0) % len(members)} of {len(members)} ranks "
            f"came within {timeout.total_seconds():.0f} s; every member must call new_group in the same order"
        ) from error
    finally:
        if watch is not None:
            watch.end_wait()
