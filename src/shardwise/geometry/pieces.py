"""The exact parts of an operand that a layer reads when its padding comes from the image itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.geometry.access import Access
from shardwise.geometry.box import Box
from shardwise.geometry.padding import Segment, filling


@dataclass(frozen=True, slots=True)
class Piece:
    """Fill the box `at` of the kernel's input from the box `source` of the operand.

    `at` counts from the start of `reach(access, shape, out)`. Along dimensions in `reversed` the source
    is mirrored; a source of extent one fills a longer `at` by repetition.
    """

    at: Box
    source: Box
    reversed: tuple[bool, ...]


def pieces(access: Access, shape: Sequence[int], out: Box) -> tuple[Piece, ...]:
    """Return the pieces of an operand that fill what the output box `out` reads.

    With constant padding, or away from the image's edges, it is one piece. What no piece names holds
    the constant. An empty output has no pieces.
    """
    if out.empty:
        return ()
    columns: list[tuple[Segment, ...]] = []
    for axis, n in zip(access, shape, strict=True):
        if axis.out is None:
            columns.append((Segment((0, n), (0, n)),))
        else:
            columns.append(filling(axis.map, out.lo[axis.out], out.hi[axis.out], n))
    return tuple(
        Piece(Box.of(s.at for s in cell), Box.of(s.source for s in cell), tuple(s.reversed for s in cell))
        for cell in itertools.product(*columns)
    )
