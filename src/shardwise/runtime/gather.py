"""Bring slices of parameters, gradients or buffers together under the user's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from shardwise.geometry import Box
from shardwise.graph import TensorSpec
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.placement import Placement
from shardwise.runtime.wire import Parcel


def stream(
    fabric: Fabric,
    placement: Placement,
    specs: Mapping[str, TensorSpec],
    local: Mapping[str, Tensor | None],
    names: Iterable[str],
    device: torch.device,
    to: int | None = None,
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield whole tensors one after another: on every rank, or on rank `to` alone (None elsewhere).

    Only one tensor is whole at a time, so a model that fits no rank can still be written by one. Collective:
    every rank must ask for the same names, and exhaust the iterator.
    """
    for name in names:
        boxes = placement.held.get(name)
        if not boxes:
            continue
        shape, dtype = placement.shapes[name], getattr(torch, specs[name].dtype)
        owners = {placement.owner(name, box): box for box in set(boxes.values()) if not box.empty}
        mine = local.get(name)
        if mine is None:
            own = boxes.get(fabric.rank)
            mine = None if own is None else torch.zeros(own.shape, dtype=dtype, device=device)
        if to is None:
            yield name, _to_all(fabric, owners, shape, dtype, mine, device)
        else:
            yield name, _to_one(fabric, owners, shape, dtype, mine, device, to, name)


def _to_all(
    fabric: Fabric,
    owners: Mapping[int, Box],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mine: Tensor | None,
    device: torch.device,
) -> Tensor:
    # Truth values are added up as small numbers: exactly one rank has them.
    whole = torch.zeros(shape, dtype=torch.uint8 if dtype is torch.bool else dtype, device=device)
    if fabric.rank in owners and mine is not None:
        whole[owners[fabric.rank].slices()] = mine.detach().to(whole.dtype)
    fabric.world.all_reduce(whole)
    return whole.to(dtype)


def _to_one(
    fabric: Fabric,
    owners: Mapping[int, Box],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mine: Tensor | None,
    device: torch.device,
    to: int,
    name: str,
) -> Tensor | None:
    if fabric.rank != to:
        if fabric.rank in owners and mine is not None:
            buffer = mine.detach().contiguous()
            fabric.world.send(Parcel(to, buffer), 0, f"{name} to rank {to}").wait()
        return None
    whole = torch.empty(shape, dtype=dtype, device=device)
    for owner, box in sorted(owners.items()):
        if owner == to and mine is not None:
            whole[box.slices()] = mine.detach()
        else:
            buffer = torch.empty(box.shape, dtype=dtype, device=device)
            fabric.world.receive(Parcel(owner, buffer), 0, f"{name} from rank {owner}").wait()
            whole[box.slices()] = buffer
    return whole
