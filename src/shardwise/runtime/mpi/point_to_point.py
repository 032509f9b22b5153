"""Messages between two ranks."""

# torch calls these by position and declares several overloads of each; one signature serves them all.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor

from shardwise.runtime.bell import ANSWERED_BYTES
from shardwise.runtime.errors import StalledError
from shardwise.runtime.mpi.buffers import readable, writable
from shardwise.runtime.mpi.core import Core, in_chain
from shardwise.runtime.mpi.library import load
from shardwise.runtime.mpi.work import MPIWork, ReceivedFromAny, StatusRequest


class PointToPoint(Core):
    """Send and receive; tensors of any dtype travel as bytes."""

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> MPIWork:
        """Start sending one tensor to a rank of this group."""
        tensor = _single(tensors, "send")
        ready = readable(tensor)
        nbytes = ready.nbytes
        buffer = load().memory.fromaddress(ready.data_ptr(), nbytes)
        request = self.comm.Isend([buffer, nbytes, self._byte], dst, tag)
        peer = self.members[dst]
        if self.poller.bell is not None:
            self.poller.bell.ring(peer)
        return MPIWork(self, request, self._deadline_seconds, "send", (peer,), tensors, ready)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> MPIWork:
        """Start receiving one tensor from a rank of this group."""
        tensor = _single(tensors, "recv")
        target, finish = writable(tensor)
        nbytes = target.nbytes
        buffer = load().memory.fromaddress(target.data_ptr(), nbytes)
        request = self.comm.Irecv([buffer, nbytes, self._byte], src, tag)
        peer = self.members[src]
        if nbytes >= ANSWERED_BYTES and (bell := self.poller.bell) is not None:
            finish = in_chain([finish, partial(bell.ring, peer)])
        return MPIWork(self, request, self._deadline_seconds, "recv", (peer,), tensors, target, finish)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MPIWork:
        """Start receiving one tensor from whichever rank sends first."""
        tensor = _single(tensors, "recv")
        target, finish = writable(tensor)
        mpi = load()
        status: Any = mpi.Status()
        buffer = mpi.memory.fromaddress(target.data_ptr(), target.nbytes)
        request = self.comm.Irecv([buffer, target.nbytes, self._byte], mpi.ANY_SOURCE, tag)
        if target.nbytes >= ANSWERED_BYTES and self.poller.bell is not None:
            finish = in_chain([finish, lambda: self.poller.ring((self.members[status.Get_source()],))])
        work = ReceivedFromAny(
            self,
            StatusRequest(request, status),
            self._deadline_seconds,
            "recv from any rank",
            self._others,
            tensors,
            target,
            finish,
        )
        work.status, work.members = status, self.members
        return work

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error on the first rank names one that did not come, or all of them."""
        asked = timeout.total_seconds() if timeout is not None else 0.0
        end = time.monotonic() + (asked if asked > 0 else self._deadline_seconds)
        if self._rank == 0:
            missing = self._missing(end, wait_all_ranks)
            if missing:
                raise StalledError(f"{self._at_barrier()}: rank {', '.join(map(str, missing))} did not come")
            for other in range(1, self._size):
                self._token(self.comm.Isend, other, end)
        else:
            self._token(self.comm.Isend, 0, end)
            self._token(self.comm.Irecv, 0, end)

    def _missing(self, end: float, all_of_them: bool) -> list[int]:
        """Return the ranks that do not come in time, or the first such one."""
        missing: list[int] = []
        for other in range(1, self._size):
            try:
                self._token(self.comm.Irecv, other, end)
            except StalledError:
                missing.append(self.members[other])
                if not all_of_them:
                    break
        return missing

    def _token(self, post: Any, other: int, end: float) -> None:
        mpi = load()
        request = post([bytearray(0), 0, self._byte], other, self.comm.Get_attr(mpi.TAG_UB))
        self.poller.ring((self.members[other],))
        left = max(0.0, end - time.monotonic())
        try:
            self.poller.wait(request, left, self._at_barrier, (self.members[other],))
        except StalledError:
            # Otherwise it would take the token of the next barrier.
            request.Cancel()
            raise

    def _at_barrier(self) -> str:
        return f"rank {self.me}: monitored_barrier (group {self.label})"


def _single(tensors: list[Tensor], name: str) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(f"{name}: found {len(tensors)} tensors; one message carries exactly one")
    return tensors[0]
