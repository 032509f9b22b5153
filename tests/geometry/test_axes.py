"""Needed ranges are not only sufficient but tight; and the small print of the index maps."""

import pickle
import random

import numpy as np
import pytest
from geometry_cases import KINDS, case, cuts
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.geometry import (
    Adaptive,
    Axis,
    AxisMap,
    Box,
    Groups,
    LocalWindow,
    Padded,
    Part,
    Resize,
    Same,
    Scaled,
    Segment,
    Transposed,
    Window,
    even_bounds,
    local,
    local_box,
    needed,
    opaque,
    pieces,
    reach,
    same,
    sources,
    spans,
)
from shardwise.geometry.access import WHOLE, span

MAPS: list[AxisMap] = [
    Same(),
    Window(3, 2, 1, 0),
    Window(2, 2, ceil=True),
    Window(3, 1, 4, 4, 2, mode="circular"),
    Transposed(3, 2, 1, 1, 1),
    Transposed(2, 4),
    Adaptive(5),
    Resize(13, "linear", True, None),
    Resize(5, "nearest", False, 0.4),
    Padded(2, -1),
    Part(3),
    Part(-4, 30),
    Part(1, None, 3),
    Groups(1, 2),
    Scaled(2, 1),
]


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("resize", "max_pool")])
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_needed_ranges_are_the_hull_of_what_is_really_read(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        one = case(kind, 1, rng)
        layer, n = one.layer, len(one.x)
        map_ = layer.maps[0]
        if isinstance(map_, (Window, Transposed)) and (map_.dilation > 1 or map_.stride > map_.kernel):
            continue  # The holes in and between such windows are part of the range that the kernel runs on.
        base = layer.whole(np.zeros(n))
        reads = np.array([layer.whole(row) != base for row in np.eye(n)])
        for a, b in spans(cuts(rng, map_.size(n), 3)):
            read = np.flatnonzero(reads[:, a:b].any(axis=1))
            lo, hi = span(map_, a, b, n)
            assert hi - lo == (read[-1] - read[0] + 1 if len(read) else 0), (map_, n, a, b)
            if len(read):
                assert (lo, hi) == (read[0], read[-1] + 1), (map_, n, a, b)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_interpolation_needs_at_most_its_support_beyond_what_it_reads(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        one = case("resize", 1, rng)
        map_, n = one.layer.maps[0], len(one.x)
        assert isinstance(map_, Resize)
        for a, b in spans(even_bounds(map_.outputs, 3)):
            if a < b:
                index = map_.table(a, b, n)[0]
                lo, hi = span(map_, a, b, n)
                assert index.min() - 1 <= lo <= index.min()
                assert index.max() < hi <= index.max() + 2


@pytest.mark.parametrize("map_", MAPS, ids=str)
@given(cut=st.lists(st.integers(0, 12), max_size=5))
def test_ownership_is_monotone_and_complete(map_: AxisMap, cut: list[int]) -> None:
    bounds = (0, *sorted(cut), 12)
    owned = map_.own(bounds, 12)
    assert owned[0] == 0
    assert owned[-1] == map_.size(12)
    assert list(owned) == sorted(owned)
    assert len(owned) == len(bounds)


@pytest.mark.parametrize("map_", MAPS, ids=str)
def test_maps_are_values_that_can_be_compared_hashed_and_sent(map_: AxisMap) -> None:
    copy = pickle.loads(pickle.dumps(map_))
    assert copy == map_
    assert hash(copy) == hash(map_)
    assert isinstance(map_, AxisMap)


@pytest.mark.parametrize("map_", MAPS, ids=str)
def test_no_outputs_need_no_inputs(map_: AxisMap) -> None:
    for at in range(map_.size(12) + 1):
        lo, hi = map_.need(at, at, 12)
        assert hi <= lo
        assert span(map_, at, at, 12) == (0, 0)
        assert local(map_, at, at, 12, (0, 0)) == LocalWindow((0, 0), (0, 0), 0)


def test_stride_two_on_eighteen_pixels_over_two_tiles_makes_nine_outputs() -> None:
    window = Window(3, 2, 1, 1)
    assert window.own((0, 9, 18), 18) == (0, 5, 9)
    assert [window.need(a, b, 18) for a, b in ((0, 5), (5, 9))] == [(-1, 10), (9, 18)]


def test_upsampling_by_two_needs_no_halo_for_nearest_and_one_pixel_for_linear() -> None:
    nearest, linear = Resize(16, "nearest", False, 2.0), Resize(16, "linear", False, 2.0)
    assert nearest.own((0, 4, 8), 8) == (0, 8, 16)
    assert [nearest.need(a, b, 8) for a, b in ((0, 8), (8, 16))] == [(0, 4), (4, 8)]
    assert [linear.need(a, b, 8) for a, b in ((0, 8), (8, 16))] == [(0, 5), (3, 8)]


def test_segments_of_the_padding_modes() -> None:
    assert sources(-2, 6, 4, "zeros") == (Segment((2, 6), (0, 4)),)
    assert sources(4, 7, 4, "constant") == ()
    assert sources(-2, 6, 4, "circular") == (
        Segment((0, 2), (2, 4)),
        Segment((2, 6), (0, 4)),
        Segment((6, 8), (0, 2)),
    )
    assert sources(-2, 6, 4, "replicate") == (
        Segment((0, 2), (0, 1)),
        Segment((2, 6), (0, 4)),
        Segment((6, 8), (3, 4)),
    )
    assert sources(-2, 6, 4, "reflect") == (
        Segment((0, 2), (1, 3), reversed=True),
        Segment((2, 6), (0, 4)),
        Segment((6, 8), (1, 3), reversed=True),
    )


@given(
    st.sampled_from(["reflect", "replicate", "circular"]),
    st.integers(2, 9),
    st.integers(-40, 40),
    st.integers(1, 40),
)
def test_segments_fill_every_position_however_far_out(mode: str, n: int, lo: int, count: int) -> None:
    wide = 60
    names = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    expected = np.pad(np.arange(n), (wide, wide + 60), mode=names[mode])[lo + wide : lo + wide + count]
    made: list[int] = []
    for s in sources(lo, lo + count, n, mode):
        assert s.at[0] == len(made)
        inputs = list(range(*s.source))[:: -1 if s.reversed else 1]
        length = s.at[1] - s.at[0]
        made += inputs * length if len(inputs) == 1 else inputs
        assert len(made) == s.at[1]
    assert made == expected.tolist()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_pieces_fill_the_kernels_input_in_two_dimensions(seed: int) -> None:
    rng = random.Random(seed)
    shape = (2, rng.randint(2, 7), rng.randint(2, 7))
    modes = [rng.choice(("zeros", "reflect", "replicate", "circular")) for _ in range(2)]
    maps = [Window(3, rng.randint(1, 2), 2, 3, mode=m) for m in modes]
    access = (WHOLE, *(Axis(1 + d, m) for d, m in enumerate(maps)))
    x = np.random.default_rng(seed).standard_normal(shape)
    padded = x
    names = {"reflect": "reflect", "replicate": "edge", "circular": "wrap", "zeros": "constant"}
    for dim, mode in enumerate(modes, 1):
        width = [(0, 0)] * dim + [(2, 3)] + [(0, 0)] * (2 - dim)
        padded = np.pad(padded, width, mode=names[mode])
    whole = [m.size(n) for m, n in zip(maps, shape[1:], strict=True)]
    out = Box.of([(0, 2), *(rng.choice(spans(even_bounds(n, 2))) for n in whole)])
    if out.empty:
        assert pieces(access, shape, out) == ()
        return
    ranges = reach(access, shape, out)
    buffer = np.zeros([hi - lo for lo, hi in ranges])
    for piece in pieces(access, shape, out):
        part = x[piece.source.slices()]
        part = np.flip(part, [d for d, r in enumerate(piece.reversed) if r])
        buffer[piece.at.slices()] = part
        assert needed(access, shape, out).contains(piece.source)
    expected = padded[:, ranges[1][0] + 2 : ranges[1][1] + 2, ranges[2][0] + 2 : ranges[2][1] + 2]
    np.testing.assert_array_equal(buffer, expected)


def test_average_pooling_divides_as_torch_does_at_the_edges() -> None:
    window = Window(3, 2, 1, 1, ceil=True)
    assert window.size(6) == 4
    assert window.divisors(0, 4, 6, True) == (3, 3, 3, 2)
    assert window.divisors(0, 4, 6, False) == (2, 3, 3, 1)
    assert window.divisors(1, 3, 6, False) == (3, 3)


def test_accesses_of_elementwise_and_opaque_layers() -> None:
    out = Box((0, 2), (3, 4))
    assert needed(same(2), (5, 6), out) == out
    assert needed(opaque(2), (5, 6), out) == Box.whole((5, 6))


def test_a_box_that_reads_only_padding_is_filled_with_constants() -> None:
    access = (Axis(0), Axis(1, Window(1, 1, 3, 0)), Axis(2, Window(3, 1, 1, 1)))
    windows = local_box(access, (2, 4, 5), Box((0, 0, 0), (2, 2, 5)), Box((0, 0, 0), (0, 0, 0)))
    assert [w.in_size for w in windows] == [2, 2, 7]
    assert all(w.crop == (0, 0) for w in windows)


def test_missing_inputs_and_unknown_modes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"outputs \[0, 4\) read the inputs \[0, 5\) of 8, held are only"):
        local(Window(3, 1, 1, 1), 0, 4, 8, (0, 4))
    with pytest.raises(ValueError, match="mode 'area' is unknown"):
        Resize(4, "area")
    with pytest.raises(ValueError, match="computed in float32 or float64, not in float16"):
        Resize(4, "linear").taps(0, 4, 2, "float16")
    with pytest.raises(ValueError, match="padding mode 'mirror' is unknown"):
        sources(-1, 3, 3, "mirror")
    with pytest.raises(ValueError, match="at least two pixels"):
        sources(-1, 2, 1, "reflect")
    with pytest.raises(ValueError, match="at least one pixel"):
        sources(-1, 2, 0, "circular")


def test_local_windows_say_when_nothing_is_to_be_done() -> None:
    inner = local(Window(3, 1, 1, 1), 2, 4, 8, (0, 8))
    edge = local(Window(3, 1, 1, 1), 0, 4, 8, (0, 8))
    mirrored = local(Window(3, 1, 1, 1, mode="reflect"), 0, 4, 8, (0, 8))
    assert inner.plain
    assert inner == LocalWindow((1, 5), (0, 2), 2)
    assert not edge.plain
    assert edge == LocalWindow((0, 5), (0, 4), 4, pad=(1, 0))
    assert not mirrored.plain
    assert [inner.in_size, edge.in_size, mirrored.in_size] == [4, 6, 6]
