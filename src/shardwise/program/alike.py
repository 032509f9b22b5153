"""Which ranks do the same in an operation: the same kernel on the same local shapes.

What is asked of kernels depends on nothing else, so that one rank of each kind is priced for all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from shardwise.geometry import Layout, Range
from shardwise.geometry.axes import Same

if TYPE_CHECKING:
    from shardwise.program.ops import Compute, Held, Normalise


def kinds(op: Compute | Normalise) -> list[list[int]]:
    """Return the positions of a group by what they do: all in one list do the same.

    They hold, want and make boxes of the same shapes, and reach over the border of the image alike.
    """
    width = len(op.makes.layout.boxes)
    if width == 1:
        return [[0]]
    layouts = [op.makes.layout, *op.wants, *([op.owned] if hasattr(op, "owned") else [])]
    columns: list[Sequence[Hashable]] = [layout.sorts for layout in layouts if layout.sorts]
    for held, wants in zip(op.reads, op.wants, strict=True):
        if held.margins is not None or held.layout is not wants:
            columns.append(_crops(held, wants))
    columns += _overhangs(op)
    if not columns:
        return [list(range(width))]
    found: dict[Hashable, list[int]] = {}
    for rank, key in enumerate(zip(*columns, strict=True)):
        found.setdefault(key, []).append(rank)
    return list(found.values())


def _crops(held: Held, wants: Layout) -> list[Hashable]:
    """Return for every rank the shape that it stores, and whether all of that is wanted."""
    stored = [held.stored(rank) for rank in range(len(wants.boxes))]
    return [(box.shape, box == want) for box, want in zip(stored, wants.boxes, strict=True)]


def _overhangs(op: Compute | Normalise) -> list[list[Range]]:
    """Return for each dimension of the first operand how far every rank reads over its ends."""
    if not op.layer.operands:
        return []
    operand, boxes = op.layer.operands[0], op.makes.layout.boxes
    result = []
    for axis, n in zip(operand.access, operand.spec.shape, strict=True):
        if axis.out is None or isinstance(axis.map, Same):
            continue
        reads: dict[Range, Range] = {}
        column = []
        for lo, hi in boxes:
            ends = (lo[axis.out], hi[axis.out])
            if ends not in reads:
                first, last = axis.map.need(*ends, n)
                reads[ends] = (max(0, -first), max(0, last - n))
            column.append(reads[ends])
        result.append(column)
    return result
