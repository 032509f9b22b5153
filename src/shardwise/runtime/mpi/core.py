"""What all operations of a group share: its communicators, its ranks and how work is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwise.runtime.mpi.buffers import Finish
from shardwise.runtime.mpi.library import load, threaded
from shardwise.runtime.mpi.work import MPIWork
from shardwise.runtime.poller import Poller, Request


class Core(dist.ProcessGroup):
    """A group of ranks over an MPI communicator.

    `comm` carries what torch asks for; `direct` is a duplicate for the runtime's own messages, so that
    their tags never meet a user's.
    """

    def __init__(
        self,
        comm: Any,
        direct: Any,
        members: Sequence[int],
        timeout: timedelta,
        name: str,
        poller: Poller,
    ) -> None:
        # Of the two constructors only this one makes an object whose methods C++ can find.
        super().__init__(comm.Get_rank(), comm.Get_size())  # type: ignore[call-arg]
        self.comm = comm
        self.direct = direct
        self.members = tuple(members)
        self.label = name
        self.poller = poller
        self._rank: int = comm.Get_rank()
        self._size: int = comm.Get_size()
        self.me = self.members[self._rank]
        self._others = tuple(rank for rank in self.members if rank != self.me)
        self._deadline_seconds = timeout.total_seconds()
        mpi = load()
        self.threaded = threaded()
        self._byte = mpi.BYTE
        self._in_place = mpi.IN_PLACE
        self._group_name = name
        self._group_desc = ""

    def getBackendName(self) -> str:
        """Return the name under which the backend is registered."""
        return "mpi4py"

    # The C++ base keeps names in its C++ backends, of which this group has none.
    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc

    @property
    def group_name(self) -> Any:
        """Return the name under which torch finds this group again."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """Return the description torch gave this group."""
        return self._group_desc

    def rank(self) -> int:
        """Return this process's rank within the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._size

    def set_timeout(self, timeout: timedelta) -> None:
        """Set after how long an operation that is not complete raises."""
        self._deadline_seconds = timeout.total_seconds()

    def submit(
        self,
        request: Request,
        name: str,
        outputs: list[Tensor],
        keep: object,
        opts: Any = None,
        finish: Finish | None = None,
    ) -> MPIWork:
        """Return the handle of a collective that was just started; `opts` may hold or be its timeout."""
        # In a pair the other rank is all there is to wake; in larger groups waking everybody at every
        # collective costs more switches than it saves.
        if self._size == 2:
            self.poller.ring(self._others)
        limit = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
        seconds = self._deadline_seconds
        # torch says "not given" by a negative time.
        if limit is not None and limit > timedelta(0):
            seconds = limit.total_seconds()
        return MPIWork(self, request, seconds, name, self._others, outputs, keep, finish)

    def shutdown(self) -> None:
        """Free the communicators."""
        mpi = load()
        if mpi.Is_finalized():
            return
        for comm in (self.comm, self.direct):
            if comm != mpi.COMM_NULL:
                comm.Free()

    def abort(self) -> None:
        """End the whole job."""
        load().COMM_WORLD.Abort(1)


def in_chain(finishes: Sequence[Finish | None]) -> Finish | None:
    """Return one function that runs all the given ones, or None when there are none."""
    present = [finish for finish in finishes if finish is not None]
    if not present:
        return None

    def run() -> None:
        for finish in present:
            finish()

    return run


def as_list(tensors: Any) -> list[Tensor]:
    """Accept both of torch's calling forms: a list of tensors, or one."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
