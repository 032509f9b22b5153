"""How one rank's share of a message list reaches the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.runtime.errors import TransportError
from shardwise.runtime.poller import FOREVER
from shardwise.runtime.session import heartbeat

SUM = "sum over the group"


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


class Post(Protocol):
    """Carry single parcels between the ranks of a group (peers are positions in the group)."""

    def send(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Start one message; its buffer must stay as it is until the message is complete."""

    def receive(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Post one receive."""


class Wire(Post, Protocol):
    """Carry sets of parcels too, and add tensors up."""

    def line(self, receives: Sequence[Parcel], sends: Sequence[Parcel], tag: int, what: str) -> Line:
        """Prepare a set of receives and sends over fixed buffers."""

    def prepare_sums(self) -> None:
        """Make what large sums need; collective over the group.

        From then on sums that are not in turn are started in one order on all ranks too.
        """

    @property
    def shared_bytes(self) -> int:
        """Return this rank's part of the memory that large sums of the group use."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Add the tensors of all ranks of the group up, in place."""

    def start_all_reduce(self, tensor: Tensor, what: str, *, in_turn: bool = False) -> Pending:
        """Start adding up; the tensor holds the sum when the result is complete.

        Sums `in_turn` are started and awaited in an order that is the same on all ranks.
        """


@dataclass(frozen=True)
class Wires:
    """The wires of a stage: among its group, and those over which statistics are shared."""

    group: Wire
    group_and_replicas: Wire
    replicas: Wire


def naming(me: int, what: str, peers: Sequence[int], tensors: Sequence[Tensor]) -> str:
    """Return who waits for what from whom, for messages to the user; all ranks are those of the world."""
    shown = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors[:3]]
    if len(tensors) > 3:
        shown.append(f"and {len(tensors) - 3} more")
    return f"rank {me}: {what}, peers {sorted(set(peers) - {me})}, tensor {', '.join(shown)}"


def watched(wait: Callable[[], object], peers: Sequence[int], what: Callable[[], str]) -> None:
    """Wait inside the transport, where nobody looks for a verdict, under the eyes of the heartbeat."""
    watch = heartbeat()
    if watch is not None:
        watch.begin_wait(peers, what, polled=False)
    try:
        wait()
    except RuntimeError as error:
        # The transport knows sockets; who waited for what is known only here.
        raise TransportError(f"{what()}: {error}") from error
    finally:
        if watch is not None:
            watch.end_wait()


def wait_for(work: Any, on_device: bool) -> None:
    """Wait for a handle of torch; where a heartbeat watches, it alone says how long."""
    if on_device or heartbeat() is None:
        work.wait()
    else:
        work.wait(FOREVER)


def highest_tag() -> int:
    """Return up to where the messages of the world may be numbered."""
    if dist.get_backend() != "mpi4py":
        return 2**31 - 1
    from shardwise.runtime.mpi.library import load

    return int(load().COMM_WORLD.Get_attr(load().TAG_UB))


def keeps_order(group: Any) -> bool:
    """Tell whether the messages of a group travel in the order of their issue, whatever their tags."""
    return "nccl" in str(dist.get_backend_config(group))


class TorchLine:
    """Receives and sends through torch.distributed, for every backend."""

    def __init__(
        self, wire: TorchWire, receives: Sequence[Parcel], sends: Sequence[Parcel], tag: int, what: str
    ) -> None:
        self.group, self.tag, self.what = wire.group, tag, what
        self.receives = tuple(Parcel(wire.ranks[p.peer], p.buffer) for p in receives)
        self.sends = tuple(Parcel(wire.ranks[p.peer], p.buffer) for p in sends)
        self.peers = tuple({p.peer: None for p in (*self.receives, *self.sends)})
        self.batched = keeps_order(self.group)
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
        watched(self._wait, self.peers, self.describe)

    def describe(self) -> str:
        """Return who waits for what from whom."""
        buffers = [p.buffer for p in (*self.receives, *self.sends)]
        return naming(dist.get_rank(), self.what, self.peers, buffers)

    def _wait(self) -> None:
        for work in self.pending:
            wait_for(work, self.batched)
        self.pending = []


class TorchPending:
    """A message under way through torch.distributed."""

    def __init__(self, work: Any, peers: Sequence[int], tensor: Tensor, what: str, on_device: bool) -> None:
        self.work, self.peers, self.tensor, self.what = work, peers, tensor, what
        self.on_device = on_device

    def wait(self) -> None:
        """Return when it is complete."""
        watched(partial(wait_for, self.work, self.on_device), self.peers, self.describe)

    def describe(self) -> str:
        """Return who waits for what from whom."""
        return naming(dist.get_rank(), self.what, self.peers, (self.tensor,))

    def done(self) -> bool:
        """Tell whether it is complete."""
        return bool(self.work.is_completed())


class TorchWire:
    """Use a torch.distributed process group; `ranks[position]` is the world rank of a peer."""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self.group: Any = group if group is not None else dist.group.WORLD
        self.ranks = tuple(ranks)
        self.on_device = keeps_order(self.group)
        self.others = tuple(rank for rank in self.ranks if rank != dist.get_rank())

    def send(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Start one message."""
        peer = self.ranks[parcel.peer]
        work = dist.isend(parcel.buffer, peer, self.group, tag)
        return TorchPending(work, (peer,), parcel.buffer, what, self.on_device)

    def receive(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Post one receive."""
        peer = self.ranks[parcel.peer]
        work = dist.irecv(parcel.buffer, peer, self.group, tag)
        return TorchPending(work, (peer,), parcel.buffer, what, self.on_device)

    def line(self, receives: Sequence[Parcel], sends: Sequence[Parcel], tag: int, what: str) -> Line:
        """Prepare a set of receives and sends over fixed buffers."""
        return TorchLine(self, receives, sends, tag, what)

    def prepare_sums(self) -> None:
        """Do nothing: the backend's own sums are used."""

    @property
    def shared_bytes(self) -> int:
        """Return nothing: the transport's own memory is not ours."""
        return 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Add the tensors of all ranks of the group up, in place."""
        if self.on_device:
            watched(
                partial(dist.all_reduce, tensor, group=self.group),
                self.others,
                lambda: naming(dist.get_rank(), SUM, self.others, (tensor,)),
            )
        else:
            self.start_all_reduce(tensor, SUM).wait()

    def start_all_reduce(self, tensor: Tensor, what: str, *, in_turn: bool = False) -> Pending:
        """Start adding up; the tensor holds the sum when the result is complete."""
        if self.on_device or heartbeat() is None:
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        else:
            # Gloo adds up in a thread of its own, which gives up by itself: it must be told before it starts.
            options = dist.AllreduceOptions()
            options.timeout = FOREVER
            work = self.group.allreduce([tensor], options)
        return TorchPending(work, self.others, tensor, what, self.on_device)


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

    def prepare_sums(self) -> None:
        """Do nothing: nothing is added up."""

    @property
    def shared_bytes(self) -> int:
        """Return nothing."""
        return 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Leave the tensor as it is."""

    def start_all_reduce(self, tensor: Tensor, what: str, *, in_turn: bool = False) -> Pending:
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
