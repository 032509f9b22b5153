"""Messages between two ranks."""

# torch calls these by position and declares several overloads of each; one signature serves them all.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from shardwise.runtime.bell import ANSWERED_BYTES
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


def _single(tensors: list[Tensor], name: str) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(f"{name}: found {len(tensors)} tensors; one message carries exactly one")
    return tensors[0]
