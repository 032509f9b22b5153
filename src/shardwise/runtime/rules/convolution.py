"""Convolution of a tile: pad by exactly what the image border asks for, crop what is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.geometry import Range
from shardwise.geometry.access import reach
from shardwise.program import Compute
from shardwise.runtime.hollow import hollow
from shardwise.runtime.rules.local import flat_pads
from shardwise.runtime.rules.pointwise import is_table, pointwise
from shardwise.runtime.rules.registry import Run, rule

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def local_groups(op: Compute, rank: int) -> int:
    """Return how many groups of a convolution this rank computes: weights are cut between groups."""
    weight, whole = op.reads[1].layout.box(rank), op.layer.operands[1].spec.shape
    groups: int = op.layer.attributes["groups"]
    return groups if groups == 1 else groups * weight.shape[0] // whole[0]


def has_bias(op: Compute, rank: int) -> bool:
    """Tell whether this rank adds the bias: of a cut contraction only the first one does."""
    return len(op.reads) > 2 and not op.reads[2].layout.box(rank).empty


def convolution_input(op: Compute, rank: int) -> tuple[tuple[slice, ...] | None, tuple[Range, ...]]:
    """Return how to crop the stored input (None: not at all) and what padding is still missing.

    Pixels behind the last window do no harm as long as no further window fits into them, so they are not
    cut off: a crop would make the kernel copy its input.
    """
    operand, nd = op.layer.operands[0], op.layer.attributes["nd"]
    stored, want = op.reads[0].stored(rank), op.wants[0].box(rank)
    ranges = reach(operand.access, operand.spec.shape, op.makes.layout.box(rank))
    first = stored.ndim - nd
    slices = list(want.slices(stored)[:first])
    pads = []
    for dim in range(first, stored.ndim):
        (lo, hi), (begin, end) = ranges[dim], stored.ranges[dim]
        last = min(hi + op.layer.attributes["stride"][dim - first] - 1, end)
        a, b = min(max(lo, begin), end), max(last, begin)
        slices.append(slice(a - begin, max(a, b) - begin))
        pads.append((max(0, min(begin, hi) - lo), max(0, hi - max(end, lo))))
    everything = all(s == slice(0, n) for s, n in zip(slices, stored.shape, strict=True))
    return (None if everything else tuple(slices)), tuple(pads)


@rule("conv")
def bind_conv(op: Compute, rank: int) -> Run:
    """Bind a convolution to this rank's box."""
    attributes = op.layer.attributes
    nd, stride, dilation = attributes["nd"], attributes["stride"], attributes["dilation"]
    slices, pads = convolution_input(op, rank)
    groups = local_groups(op, rank)
    convolve = _CONV[nd]
    native = all(lo == hi for lo, hi in pads)
    padding = tuple(lo for lo, _ in pads) if native else (0,) * nd
    explicit = None if native else flat_pads(pads)
    biased = has_bias(op, rank)
    single = all(n == 1 for n in op.layer.operands[1].spec.shape[2:]) and all(p == (0, 0) for p in pads)
    # What a kernel of one pixel steps over is not read; on the host backward is a third shorter without it.
    steps = (..., *(slice(None, None, s) for s in stride)) if single and max(stride) > 1 else None

    def run(tensors: Sequence[Any]) -> Tensor:
        x, weight = tensors[0] if slices is None else tensors[0][slices], tensors[1]
        bias = tensors[2] if biased else None
        if explicit is not None:
            x = F.pad(x, explicit)
        pace = stride
        if steps is not None and x.is_cpu:
            x, pace = _Stepped.apply(x, steps), (1,) * nd  # type: ignore[no-untyped-call]
        if single and groups == max(pace) == 1 and is_table(x):
            return pointwise(x, weight, bias)
        if nd == 2 and x.stride(1) == 1 and not weight.is_contiguous(memory_format=torch.channels_last):
            settings = [list(pace), list(padding), list(dilation), False, [0] * nd, groups]
            made: Tensor = _Turned.apply(x, weight, bias, settings)  # type: ignore[no-untyped-call]
            return made
        return convolve(x, weight, bias, pace, padding, dilation, groups)

    return run


class _Stepped(torch.autograd.Function):
    """Every n-th pixel, as a tensor of its own; its gradient keeps the memory order of the image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: tuple[Any, ...]) -> Tensor:
        ctx.steps, ctx.like = steps, hollow(x)
        return x[steps].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wide = torch.zeros_like(ctx.like)
        wide[ctx.steps] = grads[0]
        return wide, None


class _Turned(torch.autograd.Function):
    """A convolution with channels first of images that come and go with channels last.

    For kernels that are larger than the images. Images are turned again for backward, so that nothing is
    kept beside what others keep of them too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: list[Any]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings, ctx.sizes = settings, None if bias is None else list(bias.shape)
        y: Tensor = torch.ops.aten.convolution(x.contiguous(), weight, bias, *settings)
        return y.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        for_input, for_weight, for_bias = torch.ops.aten.convolution_backward(
            grads[0].contiguous(), x.contiguous(), weight, ctx.sizes, *ctx.settings, wanted
        )
        if for_input is not None:
            for_input = for_input.contiguous(memory_format=torch.channels_last)
        return for_input, for_weight, for_bias, None
