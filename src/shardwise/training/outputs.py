"""Bring the outputs of a forward pass together: on the one rank that measures them, or on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.geometry import Box, Layout, messages
from shardwise.plan import direction_of
from shardwise.runtime.engine import Engine, in_batch
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.wire import Parcel, Pending


@dataclass(frozen=True)
class _Piece:
    """A box of an output in the mini-batch, the rank that speaks for it, and where that rank finds it."""

    rank: int
    box: Box
    micro_batch: int
    inside: tuple[slice, ...]


def gather_output(engine: Engine, name: str, to: int | None = None) -> Tensor | None:
    """Return an output of the last forward pass whole: on every rank, or on rank `to` alone (None elsewhere).

    Collective over the world.
    """
    fabric = engine.bench.fabric
    spec = engine.lowered.graph[name].spec
    dtype = getattr(torch, spec.dtype)
    pieces = list(_pieces(engine, name))
    if to is None:
        # Truth values are added up as small numbers: exactly one rank has them.
        kind = torch.uint8 if dtype is torch.bool else dtype
        whole = torch.zeros(spec.shape, dtype=kind, device=engine.device)
        for piece in pieces:
            if piece.rank == fabric.rank:
                whole[piece.box.slices()] = _local(engine, name, piece).to(kind)
        fabric.world.all_reduce(whole)
        return whole.to(dtype)
    if fabric.rank != to:
        _send(engine, name, pieces, to)
        return None
    return _receive(engine, name, pieces, torch.empty(spec.shape, dtype=dtype, device=engine.device), fabric)


def _send(engine: Engine, name: str, pieces: list[_Piece], to: int) -> None:
    world, rank = engine.bench.fabric.world, engine.bench.fabric.rank
    mine = [(i, _local(engine, name, p).contiguous()) for i, p in enumerate(pieces) if p.rank == rank]
    pending = [world.send(Parcel(to, buffer), i, f"part {i} of {name} to rank {to}") for i, buffer in mine]
    for message in pending:
        message.wait()


def _receive(engine: Engine, name: str, pieces: list[_Piece], whole: Tensor, fabric: Fabric) -> Tensor:
    arriving: list[tuple[Pending, _Piece, Tensor]] = []
    for i, piece in enumerate(pieces):
        if piece.rank == fabric.rank:
            whole[piece.box.slices()] = _local(engine, name, piece)
            continue
        buffer = torch.empty(piece.box.shape, dtype=whole.dtype, device=whole.device)
        what = f"part {i} of {name} from rank {piece.rank}"
        arriving.append((fabric.world.receive(Parcel(piece.rank, buffer), i, what), piece, buffer))
    for message, piece, buffer in arriving:
        message.wait()
        whole[piece.box.slices()] = buffer
    return whole


def _local(engine: Engine, name: str, piece: _Piece) -> Tensor:
    return engine.outputs[name, piece.micro_batch][piece.inside]


def _pieces(engine: Engine, name: str) -> Iterator[_Piece]:
    """Yield the pieces of an output in the same order on every rank; each element is in one of them."""
    lowered, mesh = engine.lowered, engine.bench.fabric.mesh
    stage = next(s for s in range(mesh.stages) if name in lowered.departures(s))
    for replica in range(mesh.data):
        for m in range(lowered.program.micro_batches):
            first, _ = lowered.samples(replica, m)
            layout = lowered.stage(stage, replica, m).departures[name].layout
            whole = Layout(layout.shape, (Box.whole(layout.shape),), (-1,))
            group = mesh.group(replica, stage, direction_of(lowered.plan, m))
            for message in messages(layout, whole):
                if not message.box.empty:
                    held = message.box.slices(layout.box(message.source))
                    yield _Piece(group[message.source], in_batch(message.box, first), m, held)
