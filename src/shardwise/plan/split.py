"""How one stage is split inside: tiles, filters, channels or samples over the ranks of its group."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from shardwise.plan.errors import PlanError


class Way(StrEnum):
    """What the ranks of a group share out among them.

    `pairs` shares the filters of one layer and the channels of the next in turn: what the first makes is
    what the second reads, and only the sums that the second makes are exchanged.
    """

    NONE = "none"
    SPATIAL = "spatial"
    FILTER = "filter"
    CHANNEL = "channel"
    PAIRS = "pairs"
    BATCH = "batch"


WAYS = tuple(way for way in Way if way is not Way.NONE)


@dataclass(frozen=True, slots=True)
class Split:
    """Split a stage over `width` ranks one way; `grid` is the tile grid, or the one number of parts."""

    way: Way = Way.NONE
    grid: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if not self.grid or any(n < 1 for n in self.grid):
            raise PlanError("stages", f"a split into {self.grid} parts", "write numbers of at least 1")
        if self.width == 1:
            # One part is no split, however it is written; equal plans must compare equal.
            object.__setattr__(self, "way", Way.NONE)
            object.__setattr__(self, "grid", (1,))
        elif self.way is Way.NONE:
            raise PlanError("stages", f"{self.width} ranks without a way to share the stage", "name a way")
        elif self.way is not Way.SPATIAL and len(self.grid) > 1:
            found = f"the grid {'x'.join(map(str, self.grid))} for {self.way}"
            raise PlanError("stages", found, f"write {self.way}:{self.width}")

    @property
    def width(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.grid)

    def fitted(self, dims: int) -> Split:
        """Give the tile grid as many dimensions as images have: `2` cuts their rows, as `2x1` does."""
        missing = dims - len(self.grid)
        if self.way is not Way.SPATIAL or missing <= 0:
            return self
        return Split(Way.SPATIAL, (*self.grid, *(1,) * missing))

    def __str__(self) -> str:
        size = "x".join(map(str, self.grid))
        return size if self.way in (Way.NONE, Way.SPATIAL) else f"{self.way}:{size}"


def parse_grid(text: str, field: str) -> tuple[int, ...]:
    """Read `2x2` as `(2, 2)`."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", text):
        raise PlanError(field, f"{text!r} is no grid", "write one to three numbers, such as 2 or 2x2")
    return tuple(int(n) for n in text.split("x"))


def parse_split(text: str, field: str) -> Split:
    """Read one stage of `stages=...`: a tile grid such as `2x2`, or another way such as `filter:2`."""
    way, _, size = text.rpartition(":")
    if way and way not in WAYS:
        known = f"{', '.join(WAYS[:-1])} or {WAYS[-1]}"
        raise PlanError(field, f"{way!r} is no way to split a stage", f"write {known} before the colon")
    grid = parse_grid(size, field)
    chosen = Way(way) if way else Way.SPATIAL
    if math.prod(grid) == 1:
        return Split()
    if chosen is not Way.SPATIAL and len(grid) > 1:
        raise PlanError(field, f"{text!r} gives a grid to {chosen}", f"write {chosen}:{math.prod(grid)}")
    return Split(chosen, grid)
