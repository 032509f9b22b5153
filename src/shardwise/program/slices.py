"""Which part of a weight or buffer each rank of a group holds."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.geometry import Box
from shardwise.geometry.access import needed_by_all
from shardwise.graph import Layer, Operand
from shardwise.program.assign import Home


def slices_of(
    layer: Layer, operand: Operand, home: Home, outs: Sequence[Box]
) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """Return the shape and the boxes of a weight, bias or buffer that ranks need to make the boxes `outs`."""
    shape = operand.spec.shape
    if home.sums:
        boxes = _summands(layer, operand, home, len(outs))
    else:
        made = layer.outputs[0].shape
        boxes = needed_by_all(operand.access, shape, [_solid(box, made) for box in outs])
    return shape, boxes


def _summands(layer: Layer, operand: Operand, home: Home, width: int) -> tuple[Box, ...]:
    """Cut a weight along the contraction; a bias is added by the first rank alone."""
    shape = operand.spec.shape
    index = layer.operands.index(operand)
    for group in layer.contracts:
        for position, dim in group:
            if position == index:
                first = next(d for p, d in group if p == 0)
                parts = [box.ranges[first] for box in home.reads[0].layout(width).boxes]
                return tuple(Box.whole(shape).replace(dim, part) for part in parts)
    if operand.role != "bias":
        return (Box.whole(shape),) * width
    nothing = Box((0,) * len(shape), (0,) * len(shape))
    return (Box.whole(shape), *(nothing,) * (width - 1))


def _solid(box: Box, shape: Sequence[int]) -> Box:
    """Let a rank without outputs hold the parameters it would need if it had some.

    Only the empty extents are filled: a share without samples needs the same filters as any other.
    """
    if not box.empty:
        return box
    return Box.of((a, b) if b > a else (0, max(1, n)) for (a, b), n in zip(box.ranges, shape, strict=True))
