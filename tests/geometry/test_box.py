import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.geometry import Box

SHAPE = (5, 4, 6)


def ranges(n: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, n), st.integers(0, n))


BOXES = st.tuples(*(ranges(n) for n in SHAPE)).map(Box.of)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(lo, hi) for lo, hi in box.ranges)))


@given(BOXES)
def test_size_and_empty_count_the_elements(box: Box) -> None:
    assert box.size == len(elements(box))
    assert box.empty == (not elements(box))


@given(BOXES, BOXES)
def test_intersection_meets_and_containment_agree_with_sets(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert elements(common) == elements(a) & elements(b)
    assert a.meets(b) == bool(elements(a) & elements(b))
    assert a.contains(b) == (elements(b) <= elements(a))
    assert all(hi >= lo for lo, hi in common.ranges)


@given(BOXES, BOXES)
def test_hull_is_the_smallest_box_around_both(a: Box, b: Box) -> None:
    hull = a.hull(b)
    points = elements(a) | elements(b)
    assert points <= elements(hull)
    if points:
        for dim, span in enumerate(hull.ranges):
            inside = [p[dim] for p in points]
            assert span == (min(inside), max(inside) + 1)


@given(BOXES, BOXES)
def test_difference_is_a_partition_of_the_rest(a: Box, b: Box) -> None:
    pieces = [elements(piece) for piece in a.minus(b)]
    assert set().union(*pieces) == elements(a) - elements(b)
    assert sum(map(len, pieces)) == len(elements(a) - elements(b))
    assert all(pieces)


@given(BOXES, BOXES)
def test_slices_pick_the_box_from_what_is_stored(a: Box, b: Box) -> None:
    inner = a.intersect(b)
    if not inner.empty:
        picked = [range(lo, hi)[at] for (lo, hi), at in zip(a.ranges, inner.slices(a), strict=True)]
        assert set(itertools.product(*picked)) == elements(inner)


def test_shift_replace_and_text() -> None:
    box = Box((1, 2), (3, 5))
    assert box.shift((1, -2)) == Box((2, 0), (4, 3))
    assert box.replace(1, (0, 9)) == Box((1, 0), (3, 9))
    assert str(box) == "[1:3, 2:5]"
    assert Box.whole((3, 4)).shape == (3, 4)


def test_boxes_of_different_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="must agree"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))
    with pytest.raises(ValueError, match="different numbers of dimensions"):
        Box((0,), (1,)).hull(Box((0, 0), (1, 1)))
