"""How one rank's share of a message list reaches the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parcel:
    """A flat buffer that goes to, or comes from, one other rank."""

    peer: int
    buffer: Tensor


class Line(Protocol):
    """A fixed set of receives and sends that is started again and again."""

    def start(self) -> None:
        """Post all receives, then all sends."""

    def finish(self) -> None:
        """Return when all of them are complete."""


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Return when it is complete."""

    def done(self) -> bool:
        """Tell whether it is complete, and let it advance."""


class Wire(Protocol):
    """Carry parcels between the ranks of a group (peers are positions in the group), and add tensors up."""

    def send(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Start one message; its buffer must stay as it is until the message is complete."""

    def receive(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Post one receive."""

    def line(self, receives: Sequence[Parcel], sends: Sequence[Parcel], tag: int, what: str) -> Line:
        """Prepare a set of receives and sends over fixed buffers."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Add the tensors of all ranks of the group up, in place."""

    def start_all_reduce(self, tensor: Tensor, what: str) -> Pending:
        """Start adding up; the tensor holds the sum when the result is complete."""


@dataclass(frozen=True)
class Wires:
    """The wires of a stage: among its group, and those over which statistics are shared."""

    group: Wire
    group_and_replicas: Wire
    replicas: Wire


class TorchLine:
    """Receives and sends through torch.distributed, for every backend."""

    def __init__(self, receives: Sequence[Parcel], sends: Sequence[Parcel], group: Any, tag: int) -> None:
        self.receives, self.sends, self.group, self.tag = tuple(receives), tuple(sends), group, tag
        self.batched = dist.get_backend(group) == "nccl"
        self.pending: list[Any] = []

    def start(self) -> None:
        """Post all receives, then all sends."""
        if self.batched:
            ops = [dist.P2POp(dist.irecv, p.buffer, p.peer, self.group) for p in self.receives]
            ops += [dist.P2POp(dist.isend, p.buffer, p.peer, self.group) for p in self.sends]
            self.pending = dist.batch_isend_irecv(ops) if ops else []
            return
        self.pending = [dist.irecv(p.buffer, p.peer, self.group, self.tag) for p in self.receives]
        self.pending += [dist.isend(p.buffer, p.peer, self.group, self.tag) for p in self.sends]

    def finish(self) -> None:
        """Wait for all of them."""
        for work in self.pending:
            work.wait()
        self.pending = []


class TorchPending:
    """A message under way through torch.distributed."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        """Return when it is complete."""
        self.work.wait()

    def done(self) -> bool:
        """Tell whether it is complete."""
        return bool(self.work.is_completed())


class TorchWire:
    """Use a torch.distributed process group; `ranks[position]` is the world rank of a peer."""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self.group, self.ranks = group, tuple(ranks)

    def send(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Start one message."""
        return TorchPending(dist.isend(parcel.buffer, self.ranks[parcel.peer], self.group, tag))

    def receive(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Post one receive."""
        return TorchPending(dist.irecv(parcel.buffer, self.ranks[parcel.peer], self.group, tag))

    def line(self, receives: Sequence[Parcel], sends: Sequence[Parcel], tag: int, what: str) -> Line:
        """Prepare a set of receives and sends over fixed buffers."""

        def world(parcels: Sequence[Parcel]) -> list[Parcel]:
            return [Parcel(self.ranks[p.peer], p.buffer) for p in parcels]

        return TorchLine(world(receives), world(sends), self.group, tag)

    def all_reduce(self, tensor: Tensor) -> None:
        """Add the tensors of all ranks of the group up, in place."""
        dist.all_reduce(tensor, group=self.group)

    def start_all_reduce(self, tensor: Tensor, what: str) -> Pending:
        """Start adding up; the tensor holds the sum when the result is complete."""
        return TorchPending(dist.all_reduce(tensor, group=self.group, async_op=True))


class LoneWire:
    """The wire of a group of one: nothing ever travels."""

    def send(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Refuse: a group of one has no peers."""
        raise ValueError(f"{what}: a group of one rank cannot send messages")

    def receive(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Refuse: a group of one has no peers."""
        raise ValueError(f"{what}: a group of one rank cannot receive messages")

    def line(self, receives: Sequence[Parcel], sends: Sequence[Parcel], tag: int, what: str) -> Line:
        """Refuse any message: a group of one has no peers."""
        if receives or sends:
            raise ValueError(f"{what}: a group of one rank cannot exchange messages")
        return _Nothing()

    def all_reduce(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""

    def start_all_reduce(self, tensor: Tensor, what: str) -> Pending:
        """Leave the tensor as it is."""
        return _Nothing()


class _Nothing:
    def start(self) -> None: ...

    def finish(self) -> None: ...

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a communication buffer."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def wire_of(group: Any, ranks: Sequence[int]) -> Wire:
    """Return the fastest wire of a process group; `ranks` are the world ranks of its members in order."""
    if len(ranks) == 1:
        return LoneWire()
    if dist.get_backend(group) == "mpi4py":
        from shardwise.runtime.mpi.line import MPIWire

        return MPIWire(group, ranks)
    return TorchWire(group, ranks)
