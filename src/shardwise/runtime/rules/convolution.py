"""Convolution of a tile: pad by exactly what the image border asks for, crop what is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shardwise.program import Compute
from shardwise.runtime.rules.local import borders, flat_pads
from shardwise.runtime.rules.registry import Run, crop, rule

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def local_groups(op: Compute, rank: int) -> int:
    """Return how many groups of a convolution this rank computes: weights are cut between groups."""
    weight, whole = op.reads[1].layout.box(rank), op.layer.operands[1].spec.shape
    groups: int = op.layer.attributes["groups"]
    return groups if groups == 1 else groups * weight.shape[0] // whole[0]


def has_bias(op: Compute, rank: int) -> bool:
    """Tell whether this rank adds the bias: of a cut contraction only the first one does."""
    return len(op.reads) > 2 and not op.reads[2].layout.box(rank).empty


@rule("conv")
def bind_conv(op: Compute, rank: int) -> Run:
    """Bind a convolution to this rank's box."""
    attributes = op.layer.attributes
    nd, stride, dilation = attributes["nd"], attributes["stride"], attributes["dilation"]
    slices, pads, groups = crop(op, rank, 0), borders(op, rank), local_groups(op, rank)
    convolve = _CONV[nd]
    native = all(lo == hi for lo, hi in pads)
    padding = tuple(lo for lo, _ in pads) if native else (0,) * nd
    explicit = None if native else flat_pads(pads)
    biased = has_bias(op, rank)

    def run(tensors: Sequence[Any]) -> Tensor:
        x = tensors[0] if slices is None else tensors[0][slices]
        if explicit is not None:
            x = F.pad(x, explicit)
        return convolve(x, tensors[1], tensors[2] if biased else None, stride, padding, dilation, groups)

    return run
