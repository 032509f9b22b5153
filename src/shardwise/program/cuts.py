"""Where a value is cut: for every dimension the bounds of its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.geometry import Box, Layout, even_bounds, spans


@dataclass(frozen=True, slots=True)
class Cuts:
    """Cut a tensor along some dimensions into a grid of parts, one per rank of the group.

    `bounds[d]` rises from 0 to the extent of dimension d; `(0, n)` leaves it uncut. If no dimension is
    cut every rank holds everything.
    """

    bounds: tuple[tuple[int, ...], ...]

    @staticmethod
    def none(shape: Sequence[int]) -> Cuts:
        """Leave every dimension uncut."""
        return Cuts(tuple((0, n) for n in shape))

    @staticmethod
    def along(shape: Sequence[int], parts: dict[int, int]) -> Cuts:
        """Cut the given dimensions evenly into so many parts."""
        return Cuts(tuple(even_bounds(n, parts.get(d, 1)) for d, n in enumerate(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the global shape."""
        return tuple(b[-1] for b in self.bounds)

    @property
    def dims(self) -> tuple[int, ...]:
        """Return the dimensions that are cut."""
        return tuple(d for d, b in enumerate(self.bounds) if len(b) > 2)

    def layout(self, width: int, *, partial: bool = False) -> Layout:
        """Return the boxes of a group of `width` ranks, row-major over the cut dimensions."""
        return _layout(self.bounds, width, partial)


# The values of a network have few shapes, and every one is asked for several times.
@lru_cache(maxsize=256)
def _layout(cuts: tuple[tuple[int, ...], ...], width: int, partial: bool) -> Layout:
    shape = tuple(b[-1] for b in cuts)
    parts = math.prod(len(b) - 1 for b in cuts)
    if parts == 1:
        boxes: tuple[Box, ...] = (Box.whole(shape),) * width
    elif parts == width:
        cells: list[list[tuple[int, int]]] = [[]]
        for bounds in cuts:
            cells = [[*cell, span] for cell in cells for span in spans(bounds)]
        boxes = tuple(Box.of(cell) for cell in cells)
    else:
        raise ValueError(f"cuts of {parts} parts do not fit a group of {width} ranks")
    return Layout(shape, boxes, tuple(range(width)), partial)
