"""`sw.regrid`: move a tensor between two layouts inside a user's own autograd graph."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.geometry import Layout, messages
from shardwise.runtime.regrid import AllReduce, Exchange, bind_regrid
from shardwise.runtime.session import at_leave
from shardwise.runtime.wire import wire_of

Half = Exchange | AllReduce


class _Regrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Half, back: Half) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # Linear: the gradient's own gradient, where somebody wants it, travels forwards again.
        grad: Tensor = _Regrid.apply(grads[0].contiguous(), ctx.back, ctx.there)  # type: ignore[no-untyped-call]
        return grad, None, None


def regrid(tensor: Tensor, src: Layout, dst: Layout, group: Any = None) -> Tensor:
    """Return this rank's part of a tensor in layout `dst`, given its part in layout `src`.

    All ranks of the group call it together, forwards and backwards. The ranks of the layouts are the
    ranks within `group` (default: the world). Gradients travel back along the same messages, those of
    gradients forwards again.

    Args:
        tensor: what this rank holds, of the shape of its box in `src`.
        src: which box each rank holds now.
        dst: which box each rank is to hold.
        group: a torch.distributed group.
    """
    rank = dist.get_rank(group)
    if tuple(tensor.shape) != src.box(rank).shape:
        found, box = tuple(tensor.shape), src.box(rank)
        raise ValueError(f"regrid: rank {rank} holds {box} in the source layout, but the tensor is {found}")
    # The world by its own name: another job's world must not find the messages of this one.
    within = dist.group.WORLD if group is None else group
    there, back = _halves(src, dst, within, rank, tensor.dtype, tensor.device)
    result: Tensor = _Regrid.apply(tensor, there, back)  # type: ignore[no-untyped-call]
    return result


@lru_cache(maxsize=256)
def _halves(
    src: Layout, dst: Layout, group: Any, rank: int, dtype: torch.dtype, device: torch.device
) -> tuple[Half, Half]:
    wire = wire_of(group, dist.get_process_group_ranks(group))
    # Autograd may hand the same gradient to other functions as well.
    return bind_regrid(
        src, dst, messages(src, dst), rank, wire, dtype, device, what="sw.regrid", owns_gradient=False
    )


at_leave(_halves.cache_clear)
