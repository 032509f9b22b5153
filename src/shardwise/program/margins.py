"""Room for padding: a tile at the border of the image is padded on one side, which kernels do not offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.geometry import Box, Range
from shardwise.geometry.access import reach
from shardwise.graph import Layer
from shardwise.program.ops import Held


def margins_of(
    held: Held, readers: Sequence[Layer], outs: Mapping[str, Sequence[Box]]
) -> tuple[tuple[Range, ...], ...] | None:
    """Return the zeros around each rank's box if all readers are convolutions and one side differs."""
    result: list[tuple[Range, ...]] = []
    uneven: set[int] = set()
    for rank, box in enumerate(held.layout.boxes):
        around = [(0, 0)] * box.ndim
        for layer in readers:
            if layer.op != "conv" or layer.attributes.get("padding_mode", "zeros") != "zeros":
                return None
            out = outs[layer.name][rank]
            if out.empty:
                continue
            ranges = reach(layer.operands[0].access, held.layout.shape, out)
            for dim, ((lo, hi), n) in enumerate(zip(ranges, held.layout.shape, strict=True)):
                below, above = max(0, -lo), max(0, hi - n)
                uneven |= {dim} if below != above else set()
                around[dim] = (max(around[dim][0], below), max(around[dim][1], above))
        result.append(tuple(around))
    if not uneven:
        return None
    return tuple(
        tuple(pair if dim in uneven else (0, 0) for dim, pair in enumerate(around)) for around in result
    )
