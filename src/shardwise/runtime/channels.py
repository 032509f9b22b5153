"""Bind the edges between stages: for every edge and micro-batch that this rank is an end of, its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardwise.geometry import Layout, Message, messages
from shardwise.plan import Direction, direction_of
from shardwise.program import Held, StageProgram
from shardwise.program.actions import Edge
from shardwise.program.lowered import Lowered
from shardwise.program.validate import prove_order
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.order import FIRST, Order
from shardwise.runtime.ordered import Channel
from shardwise.runtime.transfer import Transfer
from shardwise.runtime.wire import highest_tag

Channels = dict[tuple[Edge, int, bool], list[tuple[str, Transfer]]]
"""(edge, micro-batch, whether it is the gradient's way back) -> (slot, transfer) pairs."""

# How many ways of reading one value a stage may have, and how many messages one pair of ranks.
_WAYS, _PIECES = 8, 32


def bind_channels(
    lowered: Lowered,
    fabric: Fabric,
    roles: Mapping[tuple[int, Direction], int],
    replica: int,
    device: torch.device,
    order: Order = FIRST,
) -> Channels:
    """Prepare the messages of every edge; micro-batches of one size share them."""
    result: Channels = {}
    made: dict[tuple[int, int, int, Direction, bool], list[tuple[str, Transfer]]] = {}
    backs = (False, True) if lowered.program.training else (False,)
    stride = 4 * _WAYS * _PIECES * len(lowered.program.edges)
    if fabric.size > 1 and not fabric.ordered:
        check_tags(stride * lowered.program.micro_batches - 1, highest_tag())
    for index, edge in enumerate(lowered.program.edges):
        for m in range(lowered.program.micro_batches):
            direction = direction_of(lowered.plan, m)
            if (edge.source, direction) not in roles and (edge.target, direction) not in roles:
                continue
            source = lowered.stage(edge.source, replica, m)
            target = lowered.stage(edge.target, replica, m)
            ends = tuple(fabric.mesh.group(replica, s, direction) for s in (edge.source, edge.target))
            for back in backs if edge.differentiable else backs[:1]:
                key = (index, id(source), id(target), direction, back)
                if key not in made:
                    number = (index * 2 + (direction is Direction.UP)) * 2 + back
                    tag = number * _WAYS * _PIECES
                    made[key] = _bind(edge, source, target, ends, back, fabric, device, order, tag, stride)
                result[edge, m, back] = made[key]
    if fabric.ordered and lowered.program.edges:
        prove_order(lowered.program)
        fabric.open_channels(_ways(result), device)
    return result


def check_tags(needed: int, highest: int) -> None:
    """Refuse more messages than the transport has tags for: two with one tag would be mixed up."""
    if needed > highest:
        raise ValueError(
            f"messages between stages: their tags go up to {needed}, those of this transport (MPI_TAG_UB) to "
            f"{highest}; use fewer micro_batches or stages, or backend 'gloo'"
        )


def _ways(channels: Channels) -> set[Channel]:
    """Return from whom to whom messages of this rank go."""
    return {
        (message.source, message.target, back)
        for (_, _, back), transfers in channels.items()
        for _, transfer in transfers
        for message in (*transfer.leaving, *transfer.arriving)
    }


def _bind(
    edge: Edge,
    source: StageProgram,
    target: StageProgram,
    ends: Sequence[Sequence[int]],
    back: bool,
    fabric: Fabric,
    device: torch.device,
    order: Order,
    tag: int,
    stride: int,
) -> list[tuple[str, Transfer]]:
    """Return one transfer for every way in which the target stage wants the value."""
    result = []
    made = source.departures[edge.value].layout.on(ends[0])
    wanted = [held for held in target.arrivals.values() if held.value == edge.value]
    for i, held in enumerate(wanted):
        there = held.layout.on(ends[1])
        listed = messages(made, there)
        ways: tuple[Layout, Layout] = (made, there)
        if back:
            listed = tuple(Message(m.target, m.source, m.box) for m in listed)
            ways = (there, made)
        me = fabric.rank
        what = f"{'gradient of ' if back else ''}{edge.value}"
        transfer = Transfer(
            listed, me, ways[0].box(me), ways[1].box(me), fabric.between_stages(back), dtype_of(held),
            device, order, tag + i * _PIECES, stride, what,
        )  # fmt: skip
        result.append((held.slot, transfer))
    return result


def dtype_of(held: Held) -> torch.dtype:
    """Return torch's dtype of what is held."""
    dtype: torch.dtype = getattr(torch, held.spec.dtype)
    return dtype
