"""Interpolation of a tile: every output reads the pixels, with the weights, of the whole image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.geometry import Resize
from shardwise.program import Compute
from shardwise.runtime.rules.registry import Run, crop, generic, rule


@rule("resize")
def bind_resize(op: Compute, rank: int) -> Run:
    """Bind an interpolation: natively where a rank sees all pixels or whole blocks, else by taps."""
    operand, box, want = op.layer.operands[0], op.makes.layout.box(rank), op.wants[0].box(rank)
    # Torch's ratio of sizes is right only for whole images; the outputs may not read the last pixels.
    if box.shape[2:] == op.layer.shape[2:] and want.shape[2:] == operand.spec.shape[2:]:
        return generic(op, rank)
    factors = _blocks(op, rank)
    if factors is not None:
        slices = crop(op, rank, 0)
        return lambda tensors: F.interpolate(
            tensors[0] if slices is None else tensors[0][slices], scale_factor=factors, mode="nearest"
        )
    slices = crop(op, rank, 0)
    dtype = "float64" if operand.spec.dtype == "float64" else "float32"
    taps: list[tuple[int, Tensor, Tensor]] = []
    for dim, axis in enumerate(operand.access[2:], 2):
        assert isinstance(axis.map, Resize)
        indices, weights = axis.map.table(*box.ranges[dim], operand.spec.shape[dim], dtype)
        taps.append((dim, torch.from_numpy(indices - want.lo[dim]), torch.from_numpy(weights)))

    def run(tensors: Sequence[Any]) -> Tensor:
        x: Tensor = tensors[0] if slices is None else tensors[0][slices]
        for dim, indices, weights in taps:
            x = _apply(x, dim, indices.to(x.device), weights.to(x))
        return x

    return run


def _blocks(op: Compute, rank: int) -> tuple[float, ...] | None:
    """Return the scale factors if nearest interpolation repeats each pixel a whole number of times."""
    operand, box, want = op.layer.operands[0], op.makes.layout.box(rank), op.wants[0].box(rank)
    if op.layer.attributes["mode"] != "nearest":
        return None
    factors = []
    for dim, n in enumerate(operand.spec.shape[2:], 2):
        factor, rest = divmod(op.layer.shape[dim], n)
        whole = box.ranges[dim] == (want.lo[dim] * factor, want.hi[dim] * factor)
        scale = op.layer.attributes["scale"]
        if rest or not whole or (scale is not None and scale[dim - 2] != factor):
            return None
        factors.append(float(factor))
    return tuple(factors)


def _apply(x: Tensor, dim: int, indices: Tensor, weights: Tensor) -> Tensor:
    """Interpolate along one dimension: a weighted sum of a few pixels each."""
    shape = [1] * x.ndim
    shape[dim] = len(indices)
    if indices.shape[1] == 1:
        return x.index_select(dim, indices[:, 0])
    parts = [
        x.index_select(dim, column) * weight.view(shape)
        for column, weight in zip(indices.unbind(1), weights.unbind(1), strict=True)
    ]
    return torch.stack(parts).sum(0) if len(parts) > 2 else parts[0] + parts[1]
