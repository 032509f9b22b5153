"""Convolve the interior of a tile while its halo arrives, the borders afterwards.

    +-----------------+
    |      border     |      interior: outputs whose windows lie inside the tile
    |  +-----------+  |      border:   outputs whose windows reach into the halo or the padding; they are
    |  |  interior |  |                computed from the widened tile when it is complete
    |  +-----------+  |
    |      border     |
    +-----------------+

Backward differentiates the convolution as one piece, from the widened tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.geometry import Box, Range
from shardwise.geometry.access import reach
from shardwise.program import Compute, Regrid
from shardwise.runtime.order import Order
from shardwise.runtime.rules.convolution import convolution_input, has_bias, local_groups
from shardwise.runtime.rules.registry import crop

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class _Piece:
    """A part of the output, and the part of an input that it is made of."""

    source: Slices
    target: Slices


@dataclass
class Interior:
    """The convolution of one rank's tile in pieces."""

    slot: str
    shape: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None
    settings: tuple[list[int], list[int], list[int], int]
    inside: _Piece
    borders: tuple[_Piece, ...]
    order: Order

    def start(self, tile: Tensor) -> Tensor:
        """Compute what needs no halo."""
        made = self.order.empty(self.shape, tile.dtype, tile.device)
        self._convolve(tile, self.inside, made)
        return made

    def finish(self, wide: Tensor, made: Tensor) -> Tensor:
        """Compute the rest."""
        for piece in self.borders:
            self._convolve(wide, piece, made)
        return made

    def _convolve(self, source: Tensor, piece: _Piece, made: Tensor) -> None:
        stride, padding, dilation, groups = self.settings
        with torch.no_grad():
            made[piece.target] = torch.ops.aten.convolution(
                source[piece.source], self.weight, self.bias, stride, padding, dilation, False,
                [0] * len(stride), groups,
            )  # fmt: skip


def interior_of(
    regrid: Regrid, op: Compute, rank: int, tensors: Mapping[str, Tensor], order: Order
) -> Interior | None:
    """Return how to compute a convolution around a regrid; None where it cannot be cut so."""
    layer, out = op.layer, op.makes.layout.box(rank)
    if layer.op != "conv" or op.reads[0].slot != regrid.makes.slot or out.empty:
        return None
    weight = tensors.get(op.reads[1].slot)
    if layer.attributes.get("padding_mode", "zeros") != "zeros" or regrid.source.layout.partial:
        return None
    if weight is None or not (weight.is_leaf and weight.requires_grad) or crop(op, rank, 1) is not None:
        return None
    tile, wide = regrid.source.layout.box(rank), op.reads[0].stored(rank)
    slices, pads = convolution_input(op, rank)
    first = out.ndim - layer.attributes["nd"]
    if slices is not None or tile.ranges[:first] != wide.ranges[:first] or any(a != b for a, b in pads):
        return None
    widened = [dim for dim in range(first, out.ndim) if tile.ranges[dim] != wide.ranges[dim]]
    if not widened or any(pads[dim - first] != (0, 0) for dim in widened):
        return None
    inner = out
    for dim in widened:
        inner = inner.replace(dim, _inside(op, inner, dim, tile.ranges[dim]))
    if inner.empty:
        return None

    def piece(box: Box, source: Box) -> _Piece:
        spans = reach(layer.operands[0].access, layer.operands[0].spec.shape, box)
        cut = [slice(None)] * out.ndim
        for dim in widened:
            cut[dim] = slice(spans[dim][0] - source.lo[dim], spans[dim][1] - source.lo[dim])
        return _Piece(tuple(cut), box.slices(out))

    settings = (
        list(layer.attributes["stride"]),
        [lo for lo, _ in pads],
        list(layer.attributes["dilation"]),
        local_groups(op, rank),
    )
    bias = tensors[op.reads[2].slot] if has_bias(op, rank) else None
    borders = tuple(piece(box, wide) for box in out.minus(inner))
    return Interior(op.makes.slot, out.shape, weight, bias, settings, piece(inner, tile), borders, order)


def _inside(op: Compute, out: Box, dim: int, tile: Range) -> Range:
    """Return the outputs along a dimension whose windows lie inside the tile."""
    operand = op.layer.operands[0]

    def window(at: int) -> Range:
        return reach(operand.access, operand.spec.shape, out.replace(dim, (at, at + 1)))[dim]

    lo, hi = out.ranges[dim]
    while lo < hi and window(lo)[0] < tile[0]:
        lo += 1
    while hi > lo and window(hi - 1)[1] > tile[1]:
        hi -= 1
    return lo, hi
