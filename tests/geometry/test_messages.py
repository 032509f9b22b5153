"""Applying the messages between two layouts reconstructs slices, sums and partitions; reversed, adjoints."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.geometry import Box, Layout, Message, messages, tiles, whole

Tensors = dict[int, np.ndarray]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], covering: bool, pool: int = 7) -> Layout:
    """Draw overlapping and empty boxes on some of the ranks; a covering one starts from a partition."""
    count = draw(st.integers(1, 5))
    ranks = draw(st.permutations(range(pool)))[:count]
    spans = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    boxes = [Box.of([(lo, hi) for lo, hi in draw(st.tuples(*spans))]) for _ in ranks]
    if covering:
        dim = draw(st.integers(0, len(shape) - 1))
        inner = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=count - 1, max_size=count - 1)))
        bounds = [0, *inner, shape[dim]]
        base = [Box.whole(shape).replace(dim, (bounds[i], bounds[i + 1])) for i in range(count)]
        grown = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        boxes = [b.hull(extra) if g else b for b, extra, g in zip(base, boxes, grown, strict=True)]
    return Layout(shape, tuple(boxes), tuple(ranks))


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
PAIRS = SHAPES.flatmap(lambda s: st.tuples(layouts(s, True), layouts(s, False), st.integers(0, 2**32)))
COVERED = SHAPES.flatmap(lambda s: st.tuples(layouts(s, True), layouts(s, True), st.integers(0, 2**32)))


def apply(plan: tuple[Message, ...], src: Layout, dst: Layout, x: Tensors) -> Tensors:
    result = {rank: np.zeros(box.shape) for rank, box in zip(dst.ranks, dst.boxes, strict=True)}
    for m in plan:
        result[m.target][m.box.slices(dst.box(m.target))] += x[m.source][m.box.slices(src.box(m.source))]
    return result


def reverse(plan: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(Message(m.target, m.source, m.box) for m in plan)


def pieces(layout: Layout, x: np.ndarray) -> Tensors:
    return {rank: x[box.slices()] for rank, box in zip(layout.ranks, layout.boxes, strict=True)}


def summands(layout: Layout, rng: np.random.Generator) -> Tensors:
    return {
        rank: rng.standard_normal(box.shape) for rank, box in zip(layout.ranks, layout.boxes, strict=True)
    }


def total(layout: Layout, parts: Tensors) -> np.ndarray:
    result = np.zeros(layout.shape)
    for rank, box in zip(layout.ranks, layout.boxes, strict=True):
        result[box.slices()] += parts[rank]
    return result


def dot(a: Tensors, b: Tensors) -> float:
    return sum(float((a[rank] * b[rank]).sum()) for rank in a)


MANY = settings(max_examples=250, deadline=None)


@MANY
@given(PAIRS)
def test_whole_to_whole_delivers_the_slices(drawn: tuple[Layout, Layout, int]) -> None:
    src, dst, seed = drawn
    x = np.random.default_rng(seed).standard_normal(src.shape)
    plan = messages(src, dst)
    made = apply(plan, src, dst, pieces(src, x))
    for rank, expected in pieces(dst, x).items():
        np.testing.assert_array_equal(made[rank], expected)
    # Each element arrives once, and from the rank itself wherever it already holds it.
    for rank, box in zip(dst.ranks, dst.boxes, strict=True):
        sent = sum(m.box.size for m in plan if m.target == rank and m.source != rank)
        assert sent == box.size - box.intersect(src.box(rank)).size


@MANY
@given(PAIRS)
def test_partial_to_whole_delivers_the_sums(drawn: tuple[Layout, Layout, int]) -> None:
    src, dst, seed = drawn
    src = src.as_partial()
    parts = summands(src, np.random.default_rng(seed))
    made = apply(messages(src, dst), src, dst, parts)
    for rank, expected in pieces(dst, total(src, parts)).items():
        np.testing.assert_allclose(made[rank], expected, atol=1e-12)


@MANY
@given(COVERED)
def test_whole_to_partial_gives_each_element_to_exactly_one_rank(drawn: tuple[Layout, Layout, int]) -> None:
    src, dst, seed = drawn
    dst = dst.as_partial()
    x = np.random.default_rng(seed).standard_normal(src.shape)
    made = apply(messages(src, dst), src, dst, pieces(src, x))
    np.testing.assert_array_equal(total(dst, made), x)
    copies = np.zeros(src.shape, dtype=int)
    for m in messages(src, dst):
        copies[m.box.slices()] += 1
    assert (copies == 1).all()


@MANY
@given(COVERED)
def test_whole_to_partial_moves_nothing_that_can_stay(drawn: tuple[Layout, Layout, int]) -> None:
    src, dst, _ = drawn
    stays = np.zeros(src.shape, dtype=bool)
    for rank in set(src.ranks) & set(dst.ranks):
        stays[src.box(rank).intersect(dst.box(rank)).slices()] = True
    moved = sum(m.box.size for m in messages(src, dst.as_partial()) if m.source != m.target)
    assert moved == stays.size - stays.sum()


@MANY
@given(COVERED)
def test_partial_to_partial_keeps_the_sum(drawn: tuple[Layout, Layout, int]) -> None:
    src, dst, seed = (drawn[0].as_partial(), drawn[1].as_partial(), drawn[2])
    parts = summands(src, np.random.default_rng(seed))
    made = apply(messages(src, dst), src, dst, parts)
    np.testing.assert_allclose(total(dst, made), total(src, parts), atol=1e-12)


@MANY
@given(COVERED, st.booleans(), st.booleans())
def test_the_reversed_list_is_the_adjoint(drawn: tuple[Layout, Layout, int], p: bool, q: bool) -> None:
    src, dst, seed = (drawn[0].as_partial(p), drawn[1].as_partial(q), drawn[2])
    rng = np.random.default_rng(seed)
    x, y = summands(src, rng), summands(dst, rng)
    plan = messages(src, dst)
    forward = dot(apply(plan, src, dst, x), y)
    backward = dot(x, apply(reverse(plan), dst, src, y))
    assert forward == pytest.approx(backward, abs=1e-9)


def test_messages_of_a_halo_reach_over_small_neighbours() -> None:
    src = tiles((10,), (4,), bounds=((0, 4, 5, 5, 10),))
    wide = Layout((10,), (Box((0,), (7,)), Box((2,), (8,)), Box((0,), (0,)), Box((3,), (10,))), (0, 1, 2, 3))
    listed = {(m.source, m.target): m.box for m in messages(src, wide) if m.source != m.target}
    assert listed == {
        (1, 0): Box((4,), (5,)),
        (3, 0): Box((5,), (7,)),
        (0, 1): Box((2,), (4,)),
        (3, 1): Box((5,), (8,)),
        (0, 3): Box((3,), (4,)),
        (1, 3): Box((4,), (5,)),
    }


def test_replicas_share_the_serving() -> None:
    plan = messages(whole((4,), (0, 1)), whole((4,), (2, 3, 4, 5)))
    assert [m.source for m in plan] == [0, 0, 1, 1]


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"source shape \(4,\) and target shape \(5,\) differ"):
        messages(whole((4,), 1), whole((5,), 1))
