"""Messages of the runtime itself over MPI: persistent requests on fixed buffers and one poller."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.runtime.bell import ANSWERED_BYTES
from shardwise.runtime.errors import StalledError
from shardwise.runtime.mpi.buffers import memory, readable, settle
from shardwise.runtime.mpi.library import cuda_aware, load
from shardwise.runtime.mpi.registration import group_comm, poller
from shardwise.runtime.mpi.shelf import Shelf
from shardwise.runtime.mpi.shelf import fits as fits_shelf
from shardwise.runtime.mpi.table import Table, fits
from shardwise.runtime.mpi.types import WIDENED, datatype
from shardwise.runtime.mpi.work import Batch
from shardwise.runtime.poller import Adopted
from shardwise.runtime.wire import SUM, Line, Parcel, Pending, naming


class MPILine:
    """A fixed set of receives and sends, prepared once and started again and again."""

    def __init__(
        self,
        wire: MPIWire,
        receives: Sequence[Parcel],
        sends: Sequence[Parcel],
        tag: int,
        what: str,
    ) -> None:
        mpi = load()
        self.active, self.stalled = False, False
        self.receives = [(p.buffer, _stage(p.buffer)) for p in receives]
        self.sends = [(p.buffer, _stage(p.buffer)) for p in sends]
        byte = mpi.BYTE
        self.requests = [
            wire.comm.Recv_init([memory(host), host.nbytes, byte], wire.places[p.peer], tag)
            for p, (_, host) in zip(receives, self.receives, strict=True)
        ] + [
            wire.comm.Send_init([memory(host), host.nbytes, byte], wire.places[p.peer], tag)
            for p, (_, host) in zip(sends, self.sends, strict=True)
        ]
        self.startall = mpi.Prequest.Startall
        self.wire, self.what = wire, what
        self.poller = wire.poller
        self.peers = sorted({wire.ranks[p.peer] for p in (*receives, *sends)})
        self.targets = tuple(wire.ranks[p.peer] for p in sends)
        self.answers = tuple(wire.ranks[p.peer] for p in receives if p.buffer.nbytes >= ANSWERED_BYTES)
        self.staged = any(a is not b for a, b in (*self.receives, *self.sends))
        # Of one device: what was asked of it before must be done before MPI touches its memory.
        self.on_device = next((b for _, b in (*self.receives, *self.sends) if not b.is_cpu), None)

    def start(self) -> None:
        """Post all receives, then all sends."""
        if self.staged:
            for device, host in self.sends:
                host.copy_(device)
        if self.on_device is not None:
            settle(self.on_device)
        self.active = True
        self.startall(self.requests)
        self.poller.ring(self.targets)

    def finish(self) -> None:
        """Return when all of them are complete."""
        try:
            self.poller.wait_all(self.requests, None, self.describe, self.peers, rung=True)
        except StalledError:
            self.stalled = True
            raise
        self.active = False
        self.poller.ring(self.answers)
        if self.staged:
            for device, host in self.receives:
                device.copy_(host)

    def describe(self) -> str:
        """Return who waits for what from whom."""
        return naming(self.wire.me, self.what, self.peers, [a for a, _ in (*self.receives, *self.sends)])

    def __del__(self) -> None:
        requests = getattr(self, "requests", ())
        if not requests or load().Is_finalized():
            return
        free = partial(_free, requests)
        if self.active:
            # MPI still reads and writes the buffers: both live on until it is done with them.
            keep = (self.receives, self.sends)
            self.poller.adopt(Adopted(Batch(requests), keep, free, not self.stalled))
        else:
            free()


class MPIPending:
    """One message under way, with the host copy it may need."""

    def __init__(
        self,
        request: Any,
        wire: MPIWire,
        what: str,
        peers: Sequence[int],
        copy: tuple[Tensor, Tensor],
        answers: Sequence[int] = (),
        rung: bool = True,
    ) -> None:
        self.rung = rung
        self.request, self.wire, self.what, self.peers, self.copy = request, wire, what, peers, copy
        self.answers = answers
        self.landed, self.stalled = False, False

    def wait(self) -> None:
        """Return when it is complete."""
        if self.landed:
            return
        try:
            self.wire.poller.wait(self.request, None, self.describe, self.peers, self.rung)
        except StalledError:
            self.stalled = True
            raise
        self._land()

    def done(self) -> bool:
        """Tell whether it is complete, and let it advance."""
        if not self.landed:
            if not self.request.Test():
                return False
            self._land()
        return True

    def describe(self) -> str:
        """Return who waits for what from whom."""
        return naming(self.wire.me, self.what, self.peers, self.copy[:1])

    def _land(self) -> None:
        self.landed = True
        self.wire.poller.ring(self.answers)
        device, host = self.copy
        if device is not host:
            device.copy_(host)

    def __del__(self) -> None:
        if not self.landed and not load().Is_finalized():
            self.wire.poller.adopt(Adopted(self.request, self.copy, None, not self.stalled))


class OnTable:
    """A small sum for which not all ranks have come yet."""

    def __init__(self, table: Table, tensor: Tensor, wire: MPIWire, what: str) -> None:
        self.table, self.tensor, self.wire, self.what = table, tensor, wire, what
        self.landed = False

    def wait(self) -> None:
        """Return when the tensor holds the sum."""
        if not self.landed:
            self.wire.poller.wait(self.table, None, self.describe, self.wire.others, rung=True)
            self._land()

    def done(self) -> bool:
        """Tell whether the tensor holds the sum."""
        if not self.landed and self.table.Test():
            self._land()
        return self.landed

    def describe(self) -> str:
        """Return who waits for what from whom."""
        return naming(self.wire.me, self.what, self.wire.others, (self.tensor,))

    def _land(self) -> None:
        self.landed = True
        self.table.add(self.tensor)


def _free(requests: Sequence[Any]) -> None:
    for request in requests:
        request.Free()


class MPIWire:
    """Reach the members of an `mpi4py` process group without torch's per-call cost."""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self.comm, self.ranks = group_comm(group), tuple(ranks)
        self.group: Any = group if group is not None else dist.group.WORLD
        # torch sorts the members of a group; a peer is named by its position in `ranks`.
        order = sorted(ranks)
        self.places = [order.index(rank) for rank in ranks]
        self.me = order[self.comm.Get_rank()]
        self.others = tuple(rank for rank in self.ranks if rank != self.me)
        self.poller = poller()
        self.in_place = load().IN_PLACE

    def table(self) -> Table | None:
        """Return where the group adds small tensors up, if that is better than messages."""
        if not self.poller.tables:
            return None
        found: Table | None = self.group.table()
        return found

    def prepare_sums(self) -> None:
        """Make what large sums need; collective over the group."""
        self.group.prepare_sums()

    @property
    def shared_bytes(self) -> int:
        """Return this rank's part of the memory that large sums of the group use."""
        shelf: Shelf | None = self.group.shelf
        return 0 if shelf is None else shelf.nbytes

    def line(self, receives: Sequence[Parcel], sends: Sequence[Parcel], tag: int, what: str) -> Line:
        """Prepare a set of receives and sends over fixed buffers."""
        return MPILine(self, receives, sends, tag, what)

    def send(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Start one message."""
        host = readable(parcel.buffer)
        request = self.comm.Isend([memory(host), host.nbytes, load().BYTE], self.places[parcel.peer], tag)
        self.poller.ring((self.ranks[parcel.peer],))
        return MPIPending(request, self, what, (self.ranks[parcel.peer],), (host, host))

    def receive(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Post one receive."""
        host = _stage(parcel.buffer)
        settle(host)
        request = self.comm.Irecv([memory(host), host.nbytes, load().BYTE], self.places[parcel.peer], tag)
        peers = (self.ranks[parcel.peer],)
        answers = peers if host.nbytes >= ANSWERED_BYTES else ()
        return MPIPending(request, self, what, peers, (parcel.buffer, host), answers)

    def all_reduce(self, tensor: Tensor) -> None:
        """Add the tensors of all ranks of the group up, in place."""
        self.start_all_reduce(tensor, SUM, in_turn=True).wait()

    def start_all_reduce(self, tensor: Tensor, what: str, *, in_turn: bool = False) -> Pending:
        """Start adding up; the tensor holds the sum when the result is complete."""
        if in_turn and fits(tensor) and (table := self.table()) is not None and table.free:
            table.lay(tensor)
            return OnTable(table, tensor, self, what)
        host = readable(tensor.float() if tensor.dtype in WIDENED else tensor)
        if not in_turn and self.group.shelf is not None and fits_shelf(host):
            return MPIPending(self.group.shelf.start(host), self, what, self.others, (tensor, host))
        buffer = [memory(host), host.numel(), datatype(host.dtype)]
        request = self.comm.Iallreduce(self.in_place, buffer)
        self.poller.ring(self.ranks)
        # Nobody rings between the rounds of a sum.
        return MPIPending(request, self, what, self.others, (tensor, host), rung=False)


def _stage(buffer: Tensor) -> Tensor:
    """Return the buffer itself where MPI can reach it, else one on the host."""
    if buffer.is_cpu or cuda_aware():
        return buffer
    return torch.empty_like(buffer, device="cpu", pin_memory=True)
