"""Regrids between groups, inside sub-groups, of other dtypes and with work in between, for test_regrid.py."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.geometry import Layout, messages
from shardwise.runtime.regrid import AllReduce, Exchange, bind_regrid
from shardwise.runtime.wire import Wire, wire_of

# A rank loads this file by its path, so its neighbours are not on the way of imports yet.
sys.path.append(str(Path(__file__).parent))
from regrid_cases import random_layout

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8)


def _layouts(rng: random.Random, there: Sequence[int], here: Sequence[int]) -> tuple[Layout, Layout]:
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
    src = random_layout(rng, shape, len(there), partial=rng.random() < 0.5).on(there)
    dst = random_layout(rng, shape, len(here), partial=rng.random() < 0.5).on(here)
    return src, dst.as_partial(False) if dst.partial and not dst.covers() else dst


def _small(box_shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return numbers whose sums are exact in every dtype."""
    return torch.randint(0, 4, tuple(box_shape), generator=generator)


def _pieces(layout: Layout, generator: torch.Generator) -> dict[int, Tensor]:
    whole = _small(layout.shape, generator)
    held = zip(layout.ranks, layout.boxes, strict=True)
    return {r: _small(b.shape, generator) if layout.partial else whole[b.slices()].clone() for r, b in held}


def _value(layout: Layout, pieces: dict[int, Tensor]) -> Tensor:
    result = torch.zeros(layout.shape, dtype=torch.int64)
    for rank, box in zip(layout.ranks, layout.boxes, strict=True):
        part = pieces[rank].long()
        result[box.slices()] = result[box.slices()] + part if layout.partial else part
    return result


def _at_work(half: Exchange | AllReduce, tensor: Tensor) -> Tensor:
    """Start, compute something else, finish."""
    if isinstance(half, AllReduce):
        return half(tensor)
    half.start(tensor)
    torch.ones(32, 32) @ torch.ones(32, 32)
    return half.finish()


def _check(
    src: Layout,
    dst: Layout,
    me: int,
    wire: Wire,
    group: Any,
    members: Sequence[int],
    dtype: torch.dtype,
    tag: int,
) -> list[str]:
    """Compare a regrid with slices of the global tensor and with its adjoint; return what differs."""
    generator = torch.Generator().manual_seed(tag)
    pieces = _pieces(src, generator)
    there, back = bind_regrid(src, dst, messages(src, dst), me, wire, dtype, torch.device("cpu"), tag)
    nothing = torch.zeros(src.box(me).shape, dtype=torch.int64)
    result = _at_work(there, pieces.get(me, nothing).to(dtype))
    y = _small(dst.box(me).shape, generator)
    returned = _at_work(back, y.to(dtype, copy=True))
    dots = ((result.long() * y).sum(), (pieces.get(me, nothing) * returned.long()).sum())
    gathered: list[Any] = [None] * len(members)
    dist.all_gather_object(gathered, (me, result.long(), *dots), group=group)
    found = {rank: tensor for rank, tensor, *_ in gathered}
    wrong = []
    value = _value(src, pieces)
    right = (
        torch.equal(_value(dst, found), value)
        if dst.partial
        else torch.equal(result.long(), value[dst.box(me).slices()])
    )
    if result.dtype != dtype or not right:
        wrong.append(f"{dtype} {src} -> {dst}")
    if sum(entry[2] for entry in gathered) != sum(entry[3] for entry in gathered):
        wrong.append(f"adjoint of {dtype} {src} -> {dst}")
    return wrong


def between_groups(seed: int, count: int) -> list[str]:
    """Regrid between random groups of the world, which may share ranks, overlap or be apart."""
    rng = random.Random(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    wire = wire_of(dist.group.WORLD, range(size))
    wrong = []
    for case in range(count):
        mixed = rng.sample(range(size), size)
        cut = rng.randint(1, size - 1)
        source = mixed[:cut]
        target = mixed[cut:] if rng.random() < 0.5 else rng.sample(range(size), rng.randint(1, size))
        if source == target:
            continue
        src, dst = _layouts(rng, source, target)
        dtype = DTYPES[case % len(DTYPES)]
        wrong += _check(src, dst, rank, wire, dist.group.WORLD, range(size), dtype, 1000 + case)
    return wrong


def inside_sub_groups(seed: int, count: int) -> list[str]:
    """Regrid inside groups of some ranks, numbered in an order of their own."""
    rng = random.Random(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []
    for number in range(2):
        members = rng.sample(range(size), size - 1)
        group = dist.new_group(members)
        cases = [_layouts(rng, range(size - 1), range(size - 1)) for _ in range(count)]
        if rank in members:
            wire, me = wire_of(group, members), members.index(rank)
            for case, (src, dst) in enumerate(cases):
                dtype = DTYPES[case % len(DTYPES)]
                wrong += _check(src, dst, me, wire, group, members, dtype, 100 * number + case)
    return wrong
