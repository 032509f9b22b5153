"""Prepare a rank's input for a kernel that runs without padding, and cut its output to size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.geometry import Range
from shardwise.geometry.access import reach
from shardwise.geometry.local import LocalWindow, local_box
from shardwise.program import Compute

Prepare = Callable[[Tensor], Tensor]


def borders(op: Compute, rank: int, index: int = 0) -> tuple[Range, ...]:
    """Return how far the output reaches over each border of an operand, per spatial dimension."""
    operand, nd = op.layer.operands[index], op.layer.attributes["nd"]
    shape = operand.spec.shape
    ranges = reach(operand.access, shape, op.makes.layout.box(rank))
    # A window may lie in the padding altogether: then all of it is border.
    pads = [
        (max(0, min(hi, 0) - lo), max(0, hi - max(lo, n))) for (lo, hi), n in zip(ranges, shape, strict=True)
    ]
    return tuple(pads[-nd:])


def flat_pads(pads: Sequence[Range]) -> list[int]:
    """Return pads in the order of `F.pad`: last dimension first."""
    return [n for pair in reversed(pads) for n in pair]


def windows(op: Compute, rank: int, index: int = 0) -> tuple[LocalWindow, ...]:
    """Return per dimension of an operand what to cut, fill and keep to make this rank's output."""
    operand = op.layer.operands[index]
    held = op.reads[index].layout.box(rank)
    return local_box(operand.access, operand.spec.shape, op.makes.layout.box(rank), held)


def window_slices(cut: Sequence[LocalWindow]) -> tuple[slice, ...]:
    """Return the slices that crop what is held to what the windows use."""
    return tuple(slice(*w.crop) for w in cut)


def filler(cut: Sequence[LocalWindow], value: float = 0.0) -> Prepare:
    """Return a function that crops and pads a held tensor to the kernel's input, in any padding mode."""
    slices = tuple(slice(None) if w.segments else slice(*w.crop) for w in cut)
    pads = flat_pads([(0, 0) if w.segments else w.pad for w in cut])
    picks = [(dim, _indices(w)) for dim, w in enumerate(cut) if w.segments]

    def run(tensor: Tensor) -> Tensor:
        x = tensor[slices]
        for dim, indices in picks:
            x = x.index_select(dim, indices.to(x.device))
        return F.pad(x, pads, value=value) if any(pads) else x

    return run


def _indices(window: LocalWindow) -> Tensor:
    """List for each position of the kernel's input which of the held pixels stands there."""
    indices = torch.empty(window.in_size, dtype=torch.int64)
    for segment in window.segments:
        (a, b), (lo, hi) = segment.at, segment.source
        source = torch.arange(lo, hi) if hi - lo > 1 else torch.full((b - a,), lo)
        indices[a:b] = source.flip(0) if segment.reversed else source
    return indices
