"""Room for padding: a tile at the border of the image is padded on one side, which kernels do not offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.geometry import Box, Range
from shardwise.geometry.access import SAME
from shardwise.graph import Layer
from shardwise.program.ops import Held


def margins_of(
    held: Held, readers: Sequence[Layer], outs: Mapping[str, Sequence[Box]]
) -> tuple[tuple[Range, ...], ...] | None:
    """Return the zeros around each rank's box if all readers are convolutions and one side differs."""
    if any(r.op != "conv" or r.attributes.get("padding_mode", "zeros") != "zeros" for r in readers):
        return None
    around = [[(0, 0)] * len(held.layout.shape) for _ in held.layout.boxes]
    uneven: set[int] = set()
    for layer in readers:
        for dim, (axis, n) in enumerate(zip(layer.operands[0].access, held.layout.shape, strict=True)):
            if axis.out is None or axis.map is SAME:
                continue
            known: dict[Range, Range] = {}
            for mine, out in zip(around, outs[layer.name], strict=True):
                if out.empty:
                    continue
                ends = (out.lo[axis.out], out.hi[axis.out])
                if ends not in known:
                    lo, hi = axis.map.need(*ends, n)
                    known[ends] = (max(0, -lo), max(0, hi - n))
                below, above = known[ends]
                mine[dim] = (max(mine[dim][0], below), max(mine[dim][1], above))
            if any(below != above for below, above in known.values()):
                uneven.add(dim)
    if not uneven:
        return None
    return tuple(tuple(p if dim in uneven else (0, 0) for dim, p in enumerate(mine)) for mine in around)
