"""Transposed convolution of a tile: run without padding, cut the overhang off, fill what nothing reaches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shardwise.program import Compute
from shardwise.runtime.rules.convolution import has_bias, local_groups
from shardwise.runtime.rules.local import flat_pads, window_slices, windows
from shardwise.runtime.rules.registry import Run, rule

_CONV: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@rule("conv_transpose")
def bind_transposed(op: Compute, rank: int) -> Run:
    """Bind a transposed convolution to this rank's box; every output pixel gets the bias exactly once."""
    attributes = op.layer.attributes
    nd, stride, dilation = attributes["nd"], attributes["stride"], attributes["dilation"]
    groups, biased, convolve = local_groups(op, rank), has_bias(op, rank), _CONV[nd]
    if op.makes.layout.partial:
        return _summand(op, rank)
    cut = windows(op, rank)
    slices, pixels = window_slices(cut), cut[2:]
    keep = (slice(None), slice(None), *(slice(*w.out_crop) for w in pixels))
    fill = flat_pads([w.out_fill for w in pixels])
    shape = op.makes.layout.box(rank).shape
    nothing = any(w.crop[0] == w.crop[1] for w in pixels)

    def run(tensors: Sequence[Any]) -> Tensor:
        bias = tensors[2].view(1, -1, *(1,) * nd) if biased else None
        if nothing:
            y = tensors[0].new_zeros(shape)
        else:
            y = convolve(tensors[0][slices], tensors[1], None, stride, 0, 0, groups, dilation)[keep]
            y = F.pad(y, fill) if any(fill) else y
        made: Tensor = y if bias is None else y + bias
        return made

    return run


def _summand(op: Compute, rank: int) -> Run:
    """Bind this rank's summand over its input channels: all pixels, so torch's own arithmetic is right."""
    attributes, nd = op.layer.attributes, op.layer.attributes["nd"]
    convolve, biased = _CONV[nd], has_bias(op, rank)
    slices = op.wants[0].box(rank).slices(op.reads[0].layout.box(rank))

    def run(tensors: Sequence[Any]) -> Tensor:
        bias = tensors[2] if biased else None
        y: Tensor = convolve(
            tensors[0][slices], tensors[1], bias, attributes["stride"], attributes["padding"],
            attributes["output_padding"], 1, attributes["dilation"],
        )  # fmt: skip
        return y

    return run
