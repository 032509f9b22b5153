import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.geometry import (
    Box,
    Layout,
    batch,
    channel,
    even_bounds,
    horizontal,
    spans,
    split,
    square,
    tiles,
    vertical,
    whole,
)


def counts(layout: Layout) -> np.ndarray:
    """Return how many ranks hold each element."""
    held = np.zeros(layout.shape, dtype=int)
    for box in layout.boxes:
        held[box.slices()] += 1
    return held


@given(st.integers(0, 50), st.integers(1, 12))
def test_even_bounds_differ_by_at_most_one(length: int, parts: int) -> None:
    bounds = even_bounds(length, parts)
    sizes = [hi - lo for lo, hi in spans(bounds)]
    assert (bounds[0], bounds[-1], len(bounds)) == (0, length, parts + 1)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_tiles_hold_every_element_once_also_when_some_are_empty(extent: list[int], grid: list[int]) -> None:
    grid = grid[: len(extent)]
    shape = (2, 3, *extent)
    layout = tiles(shape, grid)
    assert (counts(layout) == 1).all()
    assert layout.covers()
    assert len(layout.ranks) == math.prod(grid)
    assert all(box.shape[:2] == (2, 3) for box in layout.boxes)


def test_tiles_take_uneven_bounds_in_row_major_order() -> None:
    layout = tiles((1, 1, 97, 131), (2, 2), bounds=((0, 40, 97), (0, 131, 131)))
    corners = list(itertools.product(((0, 40), (40, 97)), ((0, 131), (131, 131))))
    assert [box.ranges[2:] for box in layout.boxes] == corners
    assert layout.boxes[1].empty


def test_named_tilings() -> None:
    shape = (2, 6, 8, 12)
    assert [b.shape for b in vertical(shape, 4).boxes] == [(2, 6, 8, 3)] * 4
    assert [b.shape for b in horizontal(shape, 4).boxes] == [(2, 6, 2, 12)] * 4
    assert [b.shape for b in square(shape, 4).boxes] == [(2, 6, 4, 6)] * 4
    assert [b.shape for b in square(shape, 6).boxes] == [(2, 6, 4, 4)] * 6
    assert [b.shape for b in batch(shape, 2).boxes] == [(1, 6, 8, 12)] * 2
    assert [b.shape[1] for b in channel(shape, 4).boxes] == [2, 2, 1, 1]
    assert split(shape, 3, 2, ranks=(5, 7)).box(7) == Box((0, 0, 0, 6), shape)


def test_whole_copies_partial_sums_and_other_ranks() -> None:
    layout = whole((3, 4), 3)
    assert layout.is_whole
    assert not layout.as_partial().is_whole
    summands = whole((3, 4), (4, 2), partial=True)
    assert summands.partial
    assert summands == whole((3, 4), 2).as_partial().on((4, 2))
    assert layout.on({0: 10, 1: 11, 2: 12}).ranks == (10, 11, 12)
    assert layout.box(17).empty


def test_layouts_that_miss_an_element_do_not_cover() -> None:
    half = Layout((4,), (Box((0,), (2,)), Box((3,), (4,))), (0, 1))
    assert not half.covers()
    assert Layout((4,), (Box((0,), (3,)), Box((2,), (4,))), (0, 1)).covers()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout((4,), (Box((0,), (2,)),), (0, 1)), "1 boxes for 2 ranks"),
        (lambda: Layout((4,), (Box((0,), (2,)),) * 2, (0, 0)), "name a rank twice"),
        (lambda: Layout((4,), (Box((0, 0), (2, 2)),), (0,)), "2-D box in shape"),
        (lambda: Layout((4,), (Box((2,), (5,)),), (0,)), "outside of the shape"),
        (lambda: tiles((4,), (2, 2)), "does not fit"),
        (lambda: tiles((4, 4), (0, 2)), "at least one tile"),
        (lambda: tiles((4,), (2,), bounds=((0, 3, 2),)), "must rise from 0 to 4"),
        (lambda: tiles((4,), (2,), ranks=(1,)), "needs 2 ranks, 1 were given"),
    ],
)
def test_impossible_layouts_are_refused_with_the_reason(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
