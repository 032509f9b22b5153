"""Pooling of a tile: maxima ignore the border, averages count what the unsplit layer counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.geometry import Window
from shardwise.program import Compute
from shardwise.runtime.rules.local import borders, flat_pads
from shardwise.runtime.rules.registry import Run, crop, rule

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


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


@rule("avg_pool")
def bind_avg_pool(op: Compute, rank: int) -> Run:
    """Bind an average pooling: average over padded windows, then correct what each window counts."""
    attributes, nd = op.layer.attributes, op.layer.attributes["nd"]
    pool, kernel, stride = _AVG[nd], attributes["kernel"], attributes["stride"]
    slices, pads = crop(op, rank, 0), flat_pads(borders(op, rank))
    factor = _factors(op, rank)

    def run(tensors: Sequence[Any]) -> Tensor:
        x = tensors[0] if slices is None else tensors[0][slices]
        x = F.pad(x, pads) if any(pads) else x
        y: Tensor = pool(x, kernel, stride)
        return y if factor is None else y * factor.to(y)

    return run


def _factors(op: Compute, rank: int) -> Tensor | None:
    """Return by what to multiply plain averages: the kernel's size over what the unsplit layer divides by."""
    attributes, operand = op.layer.attributes, op.layer.operands[0]
    size = math.prod(attributes["kernel"])
    if attributes["divisor"] is not None:
        return torch.tensor(size / attributes["divisor"], dtype=torch.float64)
    box = op.makes.layout.box(rank)
    counts = torch.ones((), dtype=torch.float64)
    for axis, n in zip(operand.access[2:], operand.spec.shape[2:], strict=True):
        assert isinstance(axis.map, Window)
        assert axis.out is not None
        a, b = box.ranges[axis.out]
        divisors = axis.map.divisors(a, b, n, attributes["count_include_pad"])
        counts = counts[..., None] * torch.tensor(divisors, dtype=torch.float64)
    return None if bool((counts == size).all()) else size / counts
