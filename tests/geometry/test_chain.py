"""Ownership, fused chains and residual joins: held boxes suffice, nothing is lost, and the price is right."""

import random
import time

import pytest
from geometry_chains import check_network
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.geometry import (
    Axis,
    Box,
    Groups,
    Layout,
    Node,
    Window,
    batch,
    channel,
    halo_bytes,
    held,
    owned,
    redundant_fraction,
    same,
    tiles,
    whole,
    work,
)
from shardwise.geometry.access import WHOLE, Access

SEEDS = st.integers(0, 2**32)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_networks_on_tiles_equal_the_unsplit_network_in_one_dimension(seed: int) -> None:
    rng = random.Random(seed)
    assert sum(check_network(1, rng) for _ in range(50)) > 50


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_networks_on_tiles_equal_the_unsplit_network_in_two_dimensions(seed: int) -> None:
    rng = random.Random(seed)
    assert sum(check_network(2, rng) for _ in range(15)) > 15


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("dims", "count"), [(1, 100_000), (2, 20_000), (3, 10_000)])
def test_a_hundred_thousand_networks_on_tiles(dims: int, count: int) -> None:
    rng = random.Random(dims)
    assert sum(check_network(dims, rng) for _ in range(count)) > count


def conv(name: str, source: str, shape: tuple[int, ...], *maps: Window, filters: int = 8) -> Node:
    access: Access = (Axis(0), WHOLE, *(Axis(2 + d, m) for d, m in enumerate(maps)))
    extent = tuple(m.size(n) for m, n in zip(maps, shape[2:], strict=True))
    return Node(name, (shape[0], filters, *extent), (source,), (access,))


def stack(shape: tuple[int, ...], *windows: Window) -> list[Node]:
    nodes = [Node("v0", shape)]
    for i, w in enumerate(windows):
        nodes.append(conv(f"v{i + 1}", f"v{i}", nodes[-1].shape, *[w] * (len(shape) - 2)))
    return nodes


@given(
    st.lists(
        st.tuples(st.sampled_from((1, 3, 5, 7)), st.integers(1, 2), st.integers(1, 3)), min_size=1, max_size=5
    )
)
def test_first_halo_is_the_sum_of_paddings_times_earlier_strides(layers: list[tuple[int, int, int]]) -> None:
    windows = [Window(k, s, d * (k // 2), d * (k // 2), d) for k, s, d in layers]
    expected, stride = 0, 1
    for w in windows:
        expected += w.pad_lo * stride
        stride *= w.stride
    tile = 3 * stride * 20
    nodes = stack((1, 1, 3 * tile), *windows)
    own = owned(nodes, {"v0": tiles(nodes[0].shape, (3,))})
    middle = held(nodes, own, {"v0"}).wanted["v0"].box(1)
    assert middle.lo[2] == tile - expected
    # On the far side the last window of a stride ends earlier.
    assert tile * 2 + expected - stride + 1 <= middle.hi[2] <= tile * 2 + expected


def test_clipping_at_every_layer_keeps_border_tiles_inside_the_image() -> None:
    nodes = stack((1, 1, 12), *[Window(3, 1, 1, 1)] * 4)
    own = owned(nodes, {"v0": tiles((1, 1, 12), (3,))})
    plan = held(nodes, own, {"v0"})
    assert [plan.made[f"v{i}"].box(0).ranges[2] for i in (1, 2, 3, 4)] == [(0, 7), (0, 6), (0, 5), (0, 4)]
    assert [plan.wanted["v0"].box(r).ranges[2] for r in range(3)] == [(0, 8), (0, 12), (4, 12)]
    assert plan.made["v0"] == own["v0"]


def test_what_is_owned_is_held_even_if_no_layer_reads_it() -> None:
    nodes = stack((1, 1, 10), Window(1, 2))
    own = owned(nodes, {"v0": tiles((1, 1, 10), (2,), bounds=((0, 4, 10),))})
    fused = held(nodes, own, ())
    assert [b.ranges[2] for b in fused.wanted["v0"].boxes] == [(0, 3), (4, 9)]
    assert fused.made["v0"] == own["v0"]


def test_price_of_two_fused_convolutions() -> None:
    nodes = stack((2, 8, 16, 16), Window(3, 1, 1, 1), Window(3, 1, 1, 1))
    own = owned(nodes, {"v0": tiles(nodes[0].shape, (2, 1))})
    fused, plain = held(nodes, own, {"v0"}), held(nodes, own, {"v0", "v1"})
    flops = {"v1": 1000.0, "v2": 1000.0}
    assert redundant_fraction(own, plain, flops) == 0
    assert redundant_fraction(own, fused, flops) == pytest.approx(2 / 16 / 2)
    assert work(fused.made, flops) == pytest.approx({0: 500 + 562.5, 1: 500 + 562.5})
    row = 2 * 8 * 16 * 4
    assert halo_bytes(fused.made["v0"], fused.wanted["v0"], 4) == {0: 2 * row, 1: 2 * row}
    assert halo_bytes(plain.made["v0"], plain.wanted["v0"], 4) == {0: row, 1: row}
    assert halo_bytes(plain.made["v1"], plain.wanted["v1"], 4) == {0: row, 1: row}
    assert halo_bytes(fused.made["v1"], fused.wanted["v1"], 4) == {0: 0, 1: 0}


def test_ownership_follows_batches_channels_and_the_divided_operand() -> None:
    shape = (4, 8, 6, 6)
    depthwise = (Axis(0), Axis(1, Groups(1, 1)), Axis(2, Window(3, 1, 1, 1)), Axis(3, Window(3, 1, 1, 1)))
    pooled = (Axis(0), Axis(1), WHOLE, WHOLE)
    scale = (Axis(0), Axis(1), WHOLE, WHOLE)
    nodes = [
        Node("x", shape),
        conv("conv", "x", shape, Window(3, 1, 1, 1), Window(3, 1, 1, 1)),
        Node("depthwise", shape, ("x",), (depthwise,)),
        Node("mean", (4, 8), ("depthwise",), (pooled,)),
        Node("gate", (4, 8, 1, 1), ("mean",), ((Axis(0), Axis(1)),)),
        Node("product", shape, ("gate", "depthwise"), (scale, same(4))),
    ]
    by_batch = owned(nodes, {"x": batch(shape, 2)})
    assert by_batch["product"] == by_batch["conv"] == batch(shape, 2)
    by_channel = owned(nodes, {"x": channel(shape, 2)})
    assert by_channel["product"] == channel(shape, 2)
    assert by_channel["mean"] == channel((4, 8), 2)
    assert by_channel["conv"] == whole(shape, 2)
    by_tile = owned(nodes, {"x": tiles(shape, (2, 1))})
    assert by_tile["product"] == tiles(shape, (2, 1))
    assert by_tile["mean"] == whole((4, 8), 2)


def test_outputs_beyond_the_last_pixel_belong_to_a_rank_that_holds_pixels() -> None:
    window = Window(1, 1, 2, 2)
    assert window.own((0, 3, 5, 5), 5) == (0, 3, 9, 9)
    nodes = stack((1, 1, 5), window)
    own = owned(nodes, {"v0": tiles((1, 1, 5), (3,), bounds=((0, 3, 5, 5),))})
    assert [b.ranges[2] for b in own["v1"].boxes] == [(0, 3), (3, 9), (9, 9)]


def deep(layers: int) -> list[Node]:
    """Return residual blocks of two 3x3 convolutions with normalisation, halved in size now and then."""
    nodes = [Node("in", (8, 8, 2048, 2048))]

    def elementwise(name: str, *sources: str) -> None:
        nodes.append(Node(name, nodes[-1].shape, sources, (same(4),) * len(sources)))

    block, last = 0, nodes[0]
    while len(nodes) < layers:
        stride = 2 if block % 100 == 99 else 1
        big, small = Window(3, stride, 1, 1), Window(3, 1, 1, 1)
        nodes.append(conv(f"{block}.conv1", last.name, last.shape, big, big))
        elementwise(f"{block}.norm1", f"{block}.conv1")
        elementwise(f"{block}.relu1", f"{block}.norm1")
        nodes.append(conv(f"{block}.conv2", f"{block}.relu1", nodes[-1].shape, small, small))
        elementwise(f"{block}.norm2", f"{block}.conv2")
        skip = last.name
        if stride == 2:
            short = Window(1, 2)
            nodes.append(conv(f"{block}.short", last.name, last.shape, short, short))
            skip = f"{block}.short"
        elementwise(f"{block}.add", f"{block}.norm2", skip)
        elementwise(f"{block}.relu", f"{block}.add")
        last = nodes[-1]
        block += 1
    return nodes


def test_three_thousand_layers_on_sixty_four_ranks_take_seconds() -> None:
    nodes = deep(3000)
    layout = tiles(nodes[0].shape, (8, 8))
    exchanges = {node.name for node in nodes if node.name.endswith("relu")}
    start = time.process_time()
    own = owned(nodes, {"in": layout})
    plan = held(nodes, own, exchanges)
    seconds = time.process_time() - start
    assert len(plan.made) == len(nodes) >= 3000
    # About one second on one core; the bound leaves room for slow and busy machines.
    assert seconds < 6


def test_wrong_chains_are_refused_by_name() -> None:
    nodes = [Node("x", (4,)), Node("y", (5,), ("x",), (same(1),))]
    with pytest.raises(ValueError, match="'x' has no inputs; give its layout"):
        owned(nodes, {})
    with pytest.raises(ValueError, match=r"node 'y': .* makes 4 of 4 along dimension 0, its shape"):
        owned(nodes, {"x": tiles((4,), (2,))})
    with pytest.raises(ValueError, match="'z' has 1 inputs and 0 accesses"):
        Node("z", (4,), ("x",))
    good = [Node("x", (4,)), Node("y", (4,), ("x",), (same(1),))]
    layouts = {"x": tiles((4,), (2,)), "y": Layout((4,), (Box((0,), (4,)),), (7,))}
    with pytest.raises(ValueError, match="'y' lives on ranks"):
        held(good, layouts, ())
