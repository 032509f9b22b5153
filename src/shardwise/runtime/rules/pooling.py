"""Pooling of a tile: maxima ignore the border, averages count what the unsplit layer counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shardwise.program import Compute
from shardwise.runtime.rules.convolution import borders, flat_pads
from shardwise.runtime.rules.registry import Run, crop, rule

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


@rule("max_pool")
def bind_max_pool(op: Compute, rank: int) -> Run:
    """Bind a maximum pooling; what lies outside of the image is minus infinity."""
    attributes = op.layer.attributes
    pool = _MAX[attributes["nd"]]
    kernel, stride, dilation = attributes["kernel"], attributes["stride"], attributes["dilation"]
    slices, pads = crop(op, rank, 0), borders(op, rank)
    native = all(lo == hi and 2 * lo <= k for (lo, hi), k in zip(pads, kernel, strict=True))
    padding = tuple(lo for lo, _ in pads) if native else 0
    explicit = None if native else flat_pads(pads)

    def run(tensors: Sequence[Any]) -> Tensor:
        x = tensors[0] if slices is None else tensors[0][slices]
        if explicit is not None:
            x = F.pad(x, explicit, value=float("-inf"))
        result: Tensor = pool(x, kernel, stride, padding, dilation)
        return result

    return run
