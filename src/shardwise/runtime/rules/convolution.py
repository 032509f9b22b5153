"""Convolution of a tile: pad by exactly what the image border asks for, crop what is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shardwise.geometry import Range
from shardwise.geometry.access import reach
from shardwise.program import Compute
from shardwise.runtime.rules.registry import Run, crop, rule

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def borders(op: Compute, rank: int) -> tuple[Range, ...]:
    """Return how far the output reaches over each border of the image, per spatial dimension."""
    operand, nd = op.layer.operands[0], op.layer.attributes["nd"]
    shape = operand.spec.shape
    ranges = reach(operand.access, shape, op.makes.layout.box(rank))
    return tuple((max(0, -lo), max(0, hi - n)) for (lo, hi), n in zip(ranges, shape, strict=True))[-nd:]


def flat_pads(pads: Sequence[Range]) -> list[int]:
    """Return pads in the order of `F.pad`: last dimension first."""
    return [n for pair in reversed(pads) for n in pair]


@rule("conv")
def bind_conv(op: Compute, rank: int) -> Run:
    """Bind a convolution to this rank's box."""
    attributes = op.layer.attributes
    nd, stride, dilation = attributes["nd"], attributes["stride"], attributes["dilation"]
    slices, pads = crop(op, rank, 0), borders(op, rank)
    convolve = _CONV[nd]
    weight_held = op.reads[1].layout.box(rank)
    groups = attributes["groups"]
    if groups > 1 and weight_held.shape[0] != op.layer.operands[1].spec.shape[0]:
        groups = groups * weight_held.shape[0] // op.layer.operands[1].spec.shape[0]
    mode = _MODES[attributes.get("padding_mode", "zeros")]
    native = mode == "constant" and all(lo == hi for lo, hi in pads)
    padding = tuple(lo for lo, _ in pads) if native else (0,) * nd
    explicit = None if native else flat_pads(pads)
    has_bias = len(op.reads) > 2 and not op.reads[2].layout.box(rank).empty

    def run(tensors: Sequence[Any]) -> Tensor:
        x = tensors[0] if slices is None else tensors[0][slices]
        if explicit is not None:
            x = F.pad(x, explicit, mode=mode)
        bias = tensors[2] if has_bias else None
        return convolve(x, tensors[1], bias, stride, padding, dilation, groups)

    return run
