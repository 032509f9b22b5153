"""Layers that only rearrange elements: the sizes in the user's call are global, the tensors are local."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shardwise.program import Compute
from shardwise.runtime.rules.local import filler, windows
from shardwise.runtime.rules.registry import Run, cropped, rule


@rule("reshape")
def bind_reshape(op: Compute, rank: int) -> Run:
    """Bind a reshape; the dimensions that are cut survive it, so the local box gives the local shape."""
    shape = op.makes.layout.box(rank).shape
    pick = cropped(op, rank)

    def run(tensors: Sequence[Any]) -> Tensor:
        result: Tensor = pick(tensors)[0].reshape(shape)
        return result

    return run


@rule("expand")
def bind_expand(op: Compute, rank: int) -> Run:
    """Bind a broadcast to this rank's box."""
    shape = op.makes.layout.box(rank).shape
    pick = cropped(op, rank)

    def run(tensors: Sequence[Any]) -> Tensor:
        result: Tensor = pick(tensors)[0].expand(shape)
        return result

    return run


@rule("slice")
def bind_slice(op: Compute, rank: int) -> Run:
    """Bind a slice: what the output reads is cropped already, only the steps are left."""
    steps = tuple(slice(None, None, step) for step in op.layer.attributes["steps"])
    pick = cropped(op, rank)

    def run(tensors: Sequence[Any]) -> Tensor:
        result: Tensor = pick(tensors)[0][steps]
        return result

    return run


@rule("pad")
def bind_pad(op: Compute, rank: int) -> Run:
    """Bind padding as a layer of its own; each rank fills the part of it that it owns."""
    value = op.layer.attributes["value"]
    fill = filler(windows(op, rank), value)
    return lambda tensors: fill(tensors[0])


@rule("pixel_shuffle", "pixel_unshuffle")
def bind_pixel_shuffle(op: Compute, rank: int) -> Run:
    """Bind sub-pixel rearrangement; a tile that starts inside a block of pixels is cut out of it."""
    factor: int = op.layer.attributes["factor"]
    up = op.layer.op == "pixel_shuffle"
    pick = cropped(op, rank)
    box, want = op.makes.layout.box(rank), op.wants[0].box(rank)
    keep = tuple(slice(None) for _ in range(2))
    for dim in (2, 3):
        start = box.lo[dim] - want.lo[dim] * factor if up else 0
        keep += (slice(start, start + box.shape[dim]),)

    def run(tensors: Sequence[Any]) -> Tensor:
        x = pick(tensors)[0]
        y: Tensor = F.pixel_shuffle(x, factor) if up else F.pixel_unshuffle(x, factor)
        return y[keep]

    return run
