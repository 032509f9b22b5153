"""Applying the messages between two layouts reconstructs slices, sums and partitions; reversed, adjoints."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.geometry import Box, Layout, Message, messages, tiles, whole

Tensors = dict[int, np.ndarray]
Drawn = tuple[Layout, Layout, np.random.Generator]

SEEDS = st.integers(0, 2**32)
MANY = settings(max_examples=30, deadline=None)


def span(rng: random.Random, n: int) -> tuple[int, int]:
    lo, hi = sorted((rng.randint(0, n), rng.randint(0, n)))
    return (lo, hi)


def layout(rng: random.Random, shape: tuple[int, ...], covering: bool) -> Layout:
    """Draw overlapping and empty boxes on some of seven ranks; a covering layout starts from a partition."""
    ranks = rng.sample(range(7), rng.randint(1, 5))
    boxes = [Box.of(span(rng, n) for n in shape) for _ in ranks]
    if covering:
        dim = rng.randrange(len(shape))
        inner = sorted(rng.randint(0, shape[dim]) for _ in ranks[1:])
        bounds = [0, *inner, shape[dim]]
        base = [Box.whole(shape).replace(dim, (bounds[i], bounds[i + 1])) for i in range(len(ranks))]
        boxes = [b.hull(x) if rng.random() < 0.5 else b for b, x in zip(base, boxes, strict=True)]
    return Layout(shape, tuple(boxes), tuple(ranks))


def pairs(seed: int, covering: bool, count: int = 40) -> Iterator[Drawn]:
    """Draw sources that hold everything and targets that want anything, or everything if `covering`."""
    rng = random.Random(seed)
    for _ in range(count):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        generator = np.random.default_rng(rng.getrandbits(32))
        yield layout(rng, shape, True), layout(rng, shape, covering), generator


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


@MANY
@given(SEEDS)
def test_whole_to_whole_delivers_the_slices(seed: int) -> None:
    for src, dst, generator in pairs(seed, covering=False):
        x = generator.standard_normal(src.shape)
        plan = messages(src, dst)
        made = apply(plan, src, dst, pieces(src, x))
        for rank, expected in pieces(dst, x).items():
            assert np.array_equal(made[rank], expected)
        # Each element arrives once, and from the rank itself wherever it already holds it.
        for rank, box in zip(dst.ranks, dst.boxes, strict=True):
            sent = sum(m.box.size for m in plan if m.target == rank and m.source != rank)
            assert sent == box.size - box.intersect(src.box(rank)).size


@MANY
@given(SEEDS)
def test_partial_to_whole_delivers_the_sums(seed: int) -> None:
    for whole_src, dst, generator in pairs(seed, covering=False):
        src = whole_src.as_partial()
        parts = summands(src, generator)
        made = apply(messages(src, dst), src, dst, parts)
        for rank, expected in pieces(dst, total(src, parts)).items():
            assert np.allclose(made[rank], expected, rtol=0, atol=1e-12)


@MANY
@given(SEEDS)
def test_whole_to_partial_gives_each_element_to_exactly_one_rank(seed: int) -> None:
    for src, whole_dst, generator in pairs(seed, covering=True):
        dst = whole_dst.as_partial()
        x = generator.standard_normal(src.shape)
        made = apply(messages(src, dst), src, dst, pieces(src, x))
        assert np.array_equal(total(dst, made), x)
        copies = np.zeros(src.shape, dtype=int)
        for m in messages(src, dst):
            copies[m.box.slices()] += 1
        assert (copies == 1).all()


@MANY
@given(SEEDS)
def test_whole_to_partial_moves_nothing_that_can_stay(seed: int) -> None:
    for src, dst, _ in pairs(seed, covering=True):
        stays = np.zeros(src.shape, dtype=bool)
        for rank in set(src.ranks) & set(dst.ranks):
            stays[src.box(rank).intersect(dst.box(rank)).slices()] = True
        moved = sum(m.box.size for m in messages(src, dst.as_partial()) if m.source != m.target)
        assert moved == stays.size - stays.sum()


@MANY
@given(SEEDS)
def test_partial_to_partial_keeps_the_sum(seed: int) -> None:
    for whole_src, whole_dst, generator in pairs(seed, covering=True):
        src, dst = whole_src.as_partial(), whole_dst.as_partial()
        parts = summands(src, generator)
        made = apply(messages(src, dst), src, dst, parts)
        assert np.allclose(total(dst, made), total(src, parts), rtol=0, atol=1e-12)


@MANY
@given(SEEDS, st.booleans(), st.booleans())
def test_the_reversed_list_is_the_adjoint(seed: int, p: bool, q: bool) -> None:
    for whole_src, whole_dst, generator in pairs(seed, covering=True):
        src, dst = whole_src.as_partial(p), whole_dst.as_partial(q)
        x, y = summands(src, generator), summands(dst, generator)
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
