"""Computations that write their result to a given place, usually the middle of a wider tensor.

Backward reads the place, not a copy of it. What is written around it later does not concern autograd: a
place has no history and a version of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.program import Compute
from shardwise.runtime.rules.registry import Run, cropped


def bind_landing(op: Compute, rank: int, reserve: Callable[[], Tensor]) -> Run:
    """Return the function that computes this rank's part of a layer into what `reserve` returns."""
    pick = cropped(op, rank)
    if op.layer.op == "relu":
        return lambda tensors: _Rectify.apply(pick(tensors)[0], (reserve(),))  # type: ignore[no-untyped-call]
    dim = op.layer.attributes["dim"]
    return lambda tensors: _Concatenate.apply(dim, (reserve(),), *pick(tensors))  # type: ignore[no-untyped-call]


class _Rectify(torch.autograd.Function):
    """`torch.relu`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: tuple[Tensor]) -> Tensor:
        ctx.save_for_backward(torch.clamp_min(x, 0, out=place[0]))
        return place[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.ops.aten.threshold_backward(grads[0], ctx.saved_tensors[0], 0), None


class _Concatenate(torch.autograd.Function):
    """`torch.cat`."""

    @staticmethod
    def forward(ctx: Any, dim: int, place: tuple[Tensor], *parts: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [part.shape[dim] for part in parts]
        return torch.cat(parts, dim, out=place[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pieces: Sequence[Tensor] = grads[0].split(ctx.sizes, ctx.dim)
        wanted = ctx.needs_input_grad[2:]
        return None, None, *(piece if want else None for piece, want in zip(pieces, wanted, strict=True))
