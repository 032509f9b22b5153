"""Adaptive pooling of a tile: the windows are those of the whole image."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.geometry import Adaptive, Range
from shardwise.program import Compute
from shardwise.runtime.rules.registry import Run, crop, rule

_REGULAR: dict[tuple[str, int], Any] = {
    (kind, nd): getattr(F, f"{kind}_pool{nd}d") for kind in ("avg", "max") for nd in (1, 2, 3)
}
_MAX: dict[int, Any] = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


def _windows(op: Compute, rank: int) -> list[tuple[Range, ...]]:
    """Return the window of each output along each spatial dimension, counted from what the rank uses."""
    operand, box, want = op.layer.operands[0], op.makes.layout.box(rank), op.wants[0].box(rank)
    result = []
    for dim, axis in enumerate(operand.access[2:], 2):
        assert isinstance(axis.map, Adaptive)
        spans = axis.map.windows(*box.ranges[dim], operand.spec.shape[dim])
        result.append(tuple((a - want.lo[dim], b - want.lo[dim]) for a, b in spans))
    return result


def _regular(op: Compute, rank: int, kind: str) -> Run | None:
    """Bind plain pooling where all windows are alike, as they are if the sizes divide."""
    attributes, slices = op.layer.attributes, crop(op, rank, 0)
    sizes = op.layer.operands[0].spec.shape[2:]
    if any(n % m for n, m in zip(sizes, attributes["output_size"], strict=True)):
        return None
    pool = _REGULAR[kind, attributes["nd"]]
    kernel = tuple(n // m for n, m in zip(sizes, attributes["output_size"], strict=True))

    def run(tensors: Sequence[Any]) -> Tensor:
        result: Tensor = pool(tensors[0] if slices is None else tensors[0][slices], kernel)
        return result

    return run


@rule("adaptive_avg_pool")
def bind_adaptive_avg_pool(op: Compute, rank: int) -> Run:
    """Bind adaptive average pooling, one dimension after the other: a mean of means of equal counts."""
    regular = _regular(op, rank, "avg")
    if regular is not None:
        return regular
    slices, want = crop(op, rank, 0), op.wants[0].box(rank)
    matrices = []
    for dim, spans in enumerate(_windows(op, rank), 2):
        matrix = torch.zeros(len(spans), want.shape[dim], dtype=torch.float64)
        for i, (a, b) in enumerate(spans):
            matrix[i, a:b] = 1.0 / (b - a)
        matrices.append((dim, matrix))

    def run(tensors: Sequence[Any]) -> Tensor:
        x: Tensor = tensors[0] if slices is None else tensors[0][slices]
        for dim, matrix in matrices:
            x = torch.tensordot(x, matrix.to(x), ([dim], [1])).movedim(-1, dim)
        return x

    return run


@rule("adaptive_max_pool")
def bind_adaptive_max_pool(op: Compute, rank: int) -> Run:
    """Bind adaptive maximum pooling, window by window where they differ."""
    regular = _regular(op, rank, "max")
    if regular is not None:
        return regular
    slices, pool = crop(op, rank, 0), _MAX[op.layer.attributes["nd"]]
    shape = op.makes.layout.box(rank).shape
    cells = [
        (slice(None), slice(None), *(slice(*span) for span in cell))
        for cell in itertools.product(*_windows(op, rank))
    ]

    def run(tensors: Sequence[Any]) -> Tensor:
        x = tensors[0] if slices is None else tensors[0][slices]
        maxima = [pool(x[cell], 1).flatten(1) for cell in cells]
        return torch.stack(maxima, 2).view(shape)

    return run
