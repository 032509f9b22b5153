"""Which part of a weight or buffer each rank of a group holds."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.geometry import Box
from shardwise.graph import Layer, Operand
from shardwise.program.assign import Home
from shardwise.program.needs import Needs


def slices_of(
    layer: Layer, operand: Operand, home: Home, outs: tuple[Box, ...], known: Needs
) -> tuple[Box, ...]:
    """Return the boxes of a weight, bias or buffer that ranks need to make the boxes `outs`."""
    shape = operand.spec.shape
    if home.sums:
        return _summands(layer, operand, home, len(outs))
    if any(box.empty for box in outs):
        outs = tuple(_solid(box, layer.outputs[0].shape) for box in outs)
    return known.of(operand.access, shape, outs)


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
