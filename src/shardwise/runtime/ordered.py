"""Messages between stages over a transport that knows no tags and lets none overtake another: NCCL.

It runs the messages of a communicator one after another, as they were issued. A receive that is posted ahead
would hold up the sends behind it, and two ranks that each post one would wait for each other for ever. So
each way between two ranks has a group of its own, one for values and one for gradients:

    rank 0  === values ==>    rank 1       only sends at one end, only receives at the other,
    rank 0  <== gradients ==  rank 1       both in the order that `prove_order` proves to be the same

A group connects when its first message is sent, and who connects waits for the other end. So all of them
are opened before the first step, in one order on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from shardwise.runtime.wire import Parcel, Pending, TorchWire, watched

Channel = tuple[int, int, bool]
"""From which rank of the world, to which, and whether it carries gradients."""

# Groups outlive the trainer that asked for them, but not their world.
_open: weakref.WeakKeyDictionary[Any, dict[Channel, TorchWire]] = weakref.WeakKeyDictionary()


class OrderedWire:
    """Carry the values, or the gradients, between any two ranks of the world."""

    def __init__(self, back: bool) -> None:
        self.back, self.rank = back, dist.get_rank()
        self.channels = _open.setdefault(dist.group.WORLD, {})

    def send(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Start one message; it arrives behind those that were sent to the same rank before."""
        wire = self.channels[self.rank, parcel.peer, self.back]
        return wire.send(Parcel(1, parcel.buffer), 0, what)

    def receive(self, parcel: Parcel, tag: int, what: str) -> Pending:
        """Post one receive, behind those that were posted for the same rank before."""
        wire = self.channels[parcel.peer, self.rank, self.back]
        return wire.receive(Parcel(0, parcel.buffer), 0, what)


def open_channels(
    wanted: Iterable[Channel], device: torch.device, new_group: Callable[[Sequence[int]], Any]
) -> None:
    """Connect the channels that this rank is an end of; collective over the world."""
    channels = _open.setdefault(dist.group.WORLD, {})
    everyones: list[Any] = [None] * dist.get_world_size()
    missing = sorted(set(wanted) - channels.keys())
    watched(
        partial(dist.all_gather_object, everyones, missing),
        [rank for rank in range(len(everyones)) if rank != dist.get_rank()],
        lambda: f"rank {dist.get_rank()}: opening channels between stages",
    )
    for channel in sorted(set(chain.from_iterable(everyones))):
        source, target, _ = channel
        group = new_group((source, target))
        if dist.get_rank() in (source, target):
            channels[channel] = TorchWire(group, (source, target))
            _greet(channels[channel], dist.get_rank() == source, device)


def _greet(wire: TorchWire, sends: bool, device: torch.device) -> None:
    """Let a group connect, by a message that says nothing."""
    nothing = torch.zeros(1, device=device)
    pass_on, peer = (wire.send, 1) if sends else (wire.receive, 0)
    pass_on(Parcel(peer, nothing), 0, "first message of a channel").wait()
