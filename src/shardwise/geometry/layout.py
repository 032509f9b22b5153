"""Which box of a global tensor each rank of a group holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardwise.geometry.box import Box, Range


@dataclass(frozen=True)
class Layout:
    """Say which box of a global tensor each rank holds, and whether the pieces are partial sums.

    `boxes[i]` belongs to `ranks[i]`. Boxes may overlap (halos, whole copies) or be empty. With
    `partial` the true value of an element is the sum over all ranks whose box contains it; without,
    every rank that holds an element holds its true value.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]
    partial: bool = False

    def __post_init__(self) -> None:
        if len(self.boxes) != len(self.ranks):
            raise ValueError(f"Layout: {len(self.boxes)} boxes for {len(self.ranks)} ranks; give one each")
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"Layout: ranks {self.ranks} name a rank twice")
        everything = Box.whole(self.shape)
        if all(len(box.lo) == len(self.shape) and everything.contains(box) for box in set(self.boxes)):
            return
        for rank, box in zip(self.ranks, self.boxes, strict=True):
            if box.ndim != len(self.shape):
                raise ValueError(f"Layout: rank {rank} has a {box.ndim}-D box in shape {self.shape}")
            if not everything.contains(box):
                raise ValueError(f"Layout: rank {rank} holds {box}, outside of the shape {self.shape}")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.boxes, self.ranks, self.partial))

    @cached_property
    def sorts(self) -> tuple[int, ...]:
        """Return a number for every box, the same for boxes of the same extents; empty if all are alike."""
        found: dict[tuple[int, ...], int] = {}
        sorts = tuple(found.setdefault(box.shape, len(found)) for box in self.boxes)
        return sorts if len(found) > 1 else ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of elements of every box."""
        return tuple(box.size for box in self.boxes)

    def box(self, rank: int) -> Box:
        """Return what `rank` holds; an empty box if it is not in the layout."""
        if 0 <= rank < len(self.ranks) and self.ranks[rank] == rank:
            return self.boxes[rank]
        try:
            return self.boxes[self.ranks.index(rank)]
        except ValueError:
            return Box((0,) * len(self.shape), (0,) * len(self.shape))

    def on(self, ranks: Sequence[int] | Mapping[int, int]) -> Layout:
        """Return the same boxes held by other ranks: the i-th new rank takes the i-th box, or by mapping."""
        if isinstance(ranks, Mapping):
            ranks = [ranks[r] for r in self.ranks]
        return Layout(self.shape, self.boxes, tuple(ranks), self.partial)

    def as_partial(self, partial: bool = True) -> Layout:
        """Return the same boxes, read as partial sums (or not)."""
        return Layout(self.shape, self.boxes, self.ranks, partial)

    @cached_property
    def is_whole(self) -> bool:
        """Tell whether every rank holds a true copy of everything."""
        everything = Box.whole(self.shape)
        return not self.partial and all(box == everything for box in self.boxes)

    def covers(self) -> bool:
        """Tell whether every element is held by at least one rank."""
        rest = [Box.whole(self.shape)]
        for box in self.boxes:
            rest = [piece for part in rest for piece in part.minus(box)]
        return all(piece.empty for piece in rest)


@lru_cache(maxsize=1024)
def even_bounds(length: int, parts: int) -> tuple[int, ...]:
    """Cut `[0, length)` into `parts` ranges whose sizes differ by at most one; trailing ones may be empty."""
    base, extra = divmod(length, parts)
    return tuple(i * base + min(i, extra) for i in range(parts + 1))


def spans(bounds: Sequence[int]) -> tuple[Range, ...]:
    """Turn the bounds `(0, a, b, n)` into the ranges `(0, a), (a, b), (b, n)`."""
    return tuple(itertools.pairwise(bounds))


def _ranks(count: int, ranks: Sequence[int] | None, what: str) -> tuple[int, ...]:
    result = tuple(range(count)) if ranks is None else tuple(ranks)
    if len(result) != count:
        raise ValueError(f"{what} needs {count} ranks, {len(result)} were given")
    return result


def whole(shape: Sequence[int], ranks: Sequence[int] | int, *, partial: bool = False) -> Layout:
    """Give every rank a copy of everything (or, partial, a summand of everything)."""
    members = tuple(range(ranks)) if isinstance(ranks, int) else tuple(ranks)
    return Layout(tuple(shape), (Box.whole(shape),) * len(members), members, partial)


def tiles(
    shape: Sequence[int],
    grid: Sequence[int],
    ranks: Sequence[int] | None = None,
    *,
    bounds: Sequence[Sequence[int]] | None = None,
) -> Layout:
    """Cut the last `len(grid)` dimensions into a grid of tiles, row-major over the ranks.

    Args:
        shape: the global shape.
        grid: how many tiles along each of the last dimensions.
        ranks: who holds them; default `0, 1, ...`.
        bounds: cut positions per dimension, e.g. `((0, 40, 97), (0, 131))`; default even.
    """
    if not 1 <= len(grid) <= len(shape):
        raise ValueError(f"tiles: a grid {tuple(grid)} does not fit a tensor of shape {tuple(shape)}")
    if min(grid) < 1:
        raise ValueError(f"tiles: grid {tuple(grid)} must have at least one tile along every dimension")
    first = len(shape) - len(grid)
    if bounds is None:
        bounds = [even_bounds(shape[first + i], n) for i, n in enumerate(grid)]
    for i, n in enumerate(grid):
        cuts = bounds[i]
        if len(cuts) != n + 1 or cuts[0] != 0 or cuts[-1] != shape[first + i] or list(cuts) != sorted(cuts):
            raise ValueError(f"tiles: bounds {tuple(cuts)} must rise from 0 to {shape[first + i]} in {n}")
    lead = [(0, n) for n in shape[:first]]
    boxes = [Box.of([*lead, *cell]) for cell in itertools.product(*(spans(b) for b in bounds))]
    return Layout(tuple(shape), tuple(boxes), _ranks(math.prod(grid), ranks, f"tiles {tuple(grid)}"))


def split(shape: Sequence[int], dim: int, parts: int, ranks: Sequence[int] | None = None) -> Layout:
    """Cut one dimension evenly over the ranks: dimension 0 gives batch shards, 1 channel shards."""
    cells = spans(even_bounds(shape[dim], parts))
    boxes = tuple(Box.whole(shape).replace(dim, cell) for cell in cells)
    return Layout(tuple(shape), boxes, _ranks(parts, ranks, f"split of dimension {dim}"))


def batch(shape: Sequence[int], parts: int, ranks: Sequence[int] | None = None) -> Layout:
    """Cut the samples evenly over the ranks."""
    return split(shape, 0, parts, ranks)


def channel(shape: Sequence[int], parts: int, ranks: Sequence[int] | None = None) -> Layout:
    """Cut the channels evenly over the ranks."""
    return split(shape, 1, parts, ranks)


def square(shape: Sequence[int], parts: int, ranks: Sequence[int] | None = None) -> Layout:
    """Cut an image into a grid that is as near to square as the number of parts allows."""
    rows = next(r for r in range(math.isqrt(parts), 0, -1) if parts % r == 0)
    return tiles(shape, (rows, parts // rows), ranks)


def vertical(shape: Sequence[int], parts: int, ranks: Sequence[int] | None = None) -> Layout:
    """Cut the width of an image: the tiles stand side by side."""
    return tiles(shape, (1, parts), ranks)


def horizontal(shape: Sequence[int], parts: int, ranks: Sequence[int] | None = None) -> Layout:
    """Cut the height of an image: the tiles lie one above the other."""
    return tiles(shape, (parts, 1), ranks)
