"""Any kernel, stride, padding and dilation on any tiles: random windows against the layer itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rules_harness import compare, subject
from test_rules_layers import IMAGE, LAYERS
from torch import nn

from shardwise.geometry import Box
from shardwise.program import Compute, Normalise

grids = st.sampled_from(["spatial=2x1", "spatial=1x3", "spatial=2x2", "spatial=5x1"])
halos = st.sampled_from(["", " halo=fused", " halo=2", " tail=replicate", " tail=batch halo=fused"])
small = st.integers(1, 4)


def network(layer: nn.Module, channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), layer, nn.Conv2d(channels, 2, 3, padding=1))


def run(layer: nn.Module, channels: int, size: tuple[int, int], line: str) -> None:
    model = network(layer, channels)
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(2, 2, *size))
    except RuntimeError:
        assume(False)
    compare(model.train(), (2, 2, *size), [line])


sizes = st.tuples(st.integers(5, 15), st.integers(5, 15))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(small, small, st.integers(0, 4), st.integers(1, 3), st.sampled_from([1, 2, 4]), sizes, grids, halos)
def test_convolution(
    k: int, s: int, p: int, d: int, groups: int, size: tuple[int, int], grid: str, halo: str
) -> None:
    run(nn.Conv2d(4, 4, k, s, p, d, groups), 4, size, grid + halo)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(small, small, st.integers(0, 3), st.integers(1, 3), st.integers(0, 3), sizes, grids, halos)
def test_transposed_convolution(
    k: int, s: int, p: int, d: int, extra: int, size: tuple[int, int], grid: str, halo: str
) -> None:
    assume(extra < max(s, d))
    run(nn.ConvTranspose2d(4, 4, k, s, p, extra, dilation=d), 4, size, grid + halo)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(small, small, st.integers(0, 2), st.booleans(), st.booleans(), st.booleans(), sizes, grids, halos)
def test_pooling(
    k: int,
    s: int,
    p: int,
    ceil: bool,
    counted: bool,
    largest: bool,
    size: tuple[int, int],
    grid: str,
    halo: str,
) -> None:
    assume(2 * p <= k)
    pool = nn.MaxPool2d(k, s, p, ceil_mode=ceil) if largest else nn.AvgPool2d(k, s, p, ceil, counted)
    run(pool, 4, size, grid + halo)


# Read all pixels, have no known windows, or are views of a single pixel.
WHOLE = ("layer norm over pixels", "softmax over pixels", "global max", "flip", "area", "expand")
TILED = [n for n, (_, s) in LAYERS.items() if s == IMAGE and n not in WHOLE and "classifier" not in n]


def tiled(op: Compute | Normalise) -> bool:
    """Tell whether ranks make parts of a layer's pixels."""
    return Box.whole(op.layer.shape) not in op.makes.layout.boxes


@pytest.mark.parametrize("name", ["layer norm over pixels", "softmax over pixels", "flip"])
def test_layers_behind_one_that_is_whole_are_tiled_again(name: str) -> None:
    shape = (1, *IMAGE[1:])
    torch.manual_seed(1)
    compare(LAYERS[name][0](), shape, ("spatial=2x2", "spatial=2x1 halo=fused"))
    works = [
        op for op in subject(LAYERS[name][0](), shape).lower("spatial=2x2").ops if isinstance(op, Compute)
    ]
    assert [tiled(op) for op in works] == [True, False, True]


# A single column is cut in two, one of them empty, before it is expanded; coverage does not count it as cut.
@pytest.mark.parametrize("name", [n for n, (_, s) in LAYERS.items() if s == IMAGE and n != "expand columns"])
def test_coverage_says_what_lowering_does(name: str) -> None:
    it = subject(LAYERS[name][0](), (1, *IMAGE[1:]))
    said = {layer.name: "tile" in layer.splits for layer in it.graph.coverage().layers}
    works = [op for op in it.lower("spatial=2x2").ops if isinstance(op, Compute | Normalise)]
    # Values of single pixels can be cut nowhere; loss terms and copies have names of their own.
    works = [op for op in works if op.layer.name in said and min(op.layer.shape[2:], default=1) > 1]
    wrong = {op.layer.name: said[op.layer.name] for op in works if said[op.layer.name] != tiled(op)}
    assert not wrong


@pytest.mark.parametrize("name", TILED)
def test_layers_are_really_tiled(name: str) -> None:
    it = subject(LAYERS[name][0](), IMAGE)
    works = [op for op in it.lower("spatial=2x1").ops if isinstance(op, Compute | Normalise)]
    images = [op for op in works if min(op.layer.shape[2:], default=1) > 1]
    assert images
    for op in images:
        everything = Box.whole(op.layer.shape)
        assert everything not in op.makes.layout.boxes, f"{op.layer.name} is computed whole"
