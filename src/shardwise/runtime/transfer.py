"""Hand a value from the ranks that make it to the ranks of another stage, for many micro-batches at once.

The same message lists as a regrid inside a group, but the two ends act at different times: receives are
posted ahead, sends never block, and every micro-batch under way has buffers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.geometry import Box, Message
from shardwise.runtime.order import Order
from shardwise.runtime.wire import Parcel, Pending, Post, empty


@dataclass
class _Arrival:
    pending: list[Pending]
    parcels: list[tuple[Message, Tensor]]


class Transfer:
    """One value on its way from one group of ranks to another (ranks are positions on the wire)."""

    def __init__(
        self,
        messages: Sequence[Message],
        rank: int,
        held: Box,
        wanted: Box,
        wire: Post,
        dtype: torch.dtype,
        device: torch.device,
        order: Order,
        tag: int,
        stride: int,
        what: str,
    ) -> None:
        self.rank, self.held, self.wanted, self.wire = rank, held, wanted, wire
        self.dtype, self.device, self.order = dtype, device, order
        self.tag, self.stride, self.what = tag, stride, what
        self.leaving = [m for m in messages if m.source == rank and m.target != rank]
        self.staying = [m for m in messages if m.source == rank and m.target == rank]
        self.arriving = [m for m in messages if m.target == rank and m.source != rank]
        self.sent: list[tuple[Pending, Tensor]] = []
        self.posted: dict[int, _Arrival] = {}
        self.kept: dict[int, Tensor] = {}

    def send(self, tensor: Tensor, micro_batch: int) -> None:
        """Start the messages of one micro-batch; the tensor must not be written to any more."""
        if tensor.dtype != self.dtype:
            # The other end has buffers of the planned size: bytes of another type would mean other numbers.
            raise ValueError(
                f"{self.what} of micro-batch {micro_batch}: found {tensor.dtype}, the model was captured "
                f"with {self.dtype}; leave torch.autocast out of the step, and convert the model and its "
                "inputs instead, before the trainer is made"
            )
        self.sent = [entry for entry in self.sent if not entry[0].done()]
        for i, m in enumerate(self.leaving):
            piece = tensor if m.box == self.held else tensor[m.box.slices(self.held)]
            buffer = self.order.row(piece)
            tag = self.tag + micro_batch * self.stride + _nth(self.leaving, i)
            what = f"{self.what} of micro-batch {micro_batch} to rank {m.target}"
            self.sent.append((self.wire.send(Parcel(m.target, buffer), tag, what), buffer))
        if self.staying:
            self.kept[micro_batch] = tensor

    def post(self, micro_batch: int) -> None:
        """Post the receives of one micro-batch ahead of time; posting twice is harmless."""
        if micro_batch in self.posted:
            return
        pending, parcels = [], []
        for i, m in enumerate(self.arriving):
            buffer = empty((m.box.size,), self.dtype, self.device)
            tag = self.tag + micro_batch * self.stride + _nth(self.arriving, i)
            what = f"{self.what} of micro-batch {micro_batch} from rank {m.source}"
            pending.append(self.wire.receive(Parcel(m.source, buffer), tag, what))
            parcels.append((m, self.order.shaped(buffer, m.box.shape)))
        self.posted[micro_batch] = _Arrival(pending, parcels)

    def receive(self, micro_batch: int) -> Tensor:
        """Return what this rank wants of one micro-batch, waiting for what has not arrived."""
        self.post(micro_batch)
        arrival = self.posted.pop(micro_batch)
        for pending in arrival.pending:
            pending.wait()
        if len(arrival.parcels) == 1 and not self.staying and arrival.parcels[0][0].box == self.wanted:
            return arrival.parcels[0][1]
        result = self.order.zeros(self.wanted.shape, self.dtype, self.device)
        if self.staying:
            source = self.kept.pop(micro_batch)
            for m in self.staying:
                result[m.box.slices(self.wanted)] += source[m.box.slices(self.held)]
        for m, buffer in arrival.parcels:
            result[m.box.slices(self.wanted)] += buffer
        return result

    def drain(self) -> None:
        """Wait until everything that was sent is on its way."""
        for pending, _ in self.sent:
            pending.wait()
        self.sent = []


def _nth(messages: Sequence[Message], index: int) -> int:
    """Number the messages between the same two ranks, so that both ends give them the same tag."""
    m = messages[index]
    return sum(1 for other in messages[:index] if (other.source, other.target) == (m.source, m.target))
