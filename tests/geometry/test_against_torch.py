"""The brute-force layers and the sizes that the geometry is tested with are those of torch."""

import random

import geometry_brute as brute
import numpy as np
import pytest
import torch
from geometry_cases import case, close, resizes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from shardwise.geometry import Adaptive, Padded, Resize, Transposed, Window, filling

FEW = settings(max_examples=30, deadline=None)
SEEDS = st.integers(0, 2**32)
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE_POOLS = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def batched(x: np.ndarray, dims: int) -> torch.Tensor:
    """Put all leading dimensions into the batch."""
    return torch.from_numpy(np.ascontiguousarray(x)).reshape(-1, 1, *x.shape[x.ndim - dims :])


def compare(layer: brute.Layer, x: np.ndarray, y: torch.Tensor) -> None:
    expected = y.numpy().reshape(*x.shape[: x.ndim - len(layer.maps)], *y.shape[2:])
    extent = x.shape[x.ndim - len(layer.maps) :]
    assert expected.shape[-len(extent) :] == tuple(m.size(n) for m, n in zip(layer.maps, extent, strict=True))
    assert close(layer.whole(x), expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
@FEW
@given(SEEDS)
def test_convolution_is_torchs(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        one = case("convolution", dims, rng)
        maps = [Window(m.kernel, m.stride, m.pad_lo, m.pad_hi, m.dilation) for m in one.layer.maps]
        layer = brute.Convolution(maps, np.random.default_rng(seed))
        x = batched(one.x, dims)
        x = F.pad(x, [p for m in reversed(maps) for p in (m.pad_lo, m.pad_hi)])
        weight = torch.from_numpy(layer.weight)[None, None]
        strides, dilations = [m.stride for m in maps], [m.dilation for m in maps]
        y = CONVOLUTIONS[dims](x, weight, stride=strides, dilation=dilations)
        compare(layer, one.x, y)


@pytest.mark.parametrize("dims", [1, 2, 3])
@FEW
@given(SEEDS)
def test_transposed_convolution_is_torchs(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        one = case("transposed", dims, rng)
        maps: list[Transposed] = list(one.layer.maps)  # type: ignore[arg-type]
        weight = torch.from_numpy(one.layer.weight)[None, None]  # type: ignore[attr-defined]
        settings_of = {
            "stride": [m.stride for m in maps],
            "padding": [m.padding for m in maps],
            "output_padding": [m.output_padding for m in maps],
            "dilation": [m.dilation for m in maps],
        }
        compare(one.layer, one.x, TRANSPOSED[dims](batched(one.x, dims), weight, **settings_of))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["max_pool", "average_pool"])
@FEW
@given(SEEDS)
def test_pooling_is_torchs(kind: str, dims: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        one = case(kind, dims, rng)
        ceil = rng.random() < 0.5
        maps = [Window(m.kernel, m.stride, m.pad_lo, m.pad_hi, m.dilation, ceil=ceil) for m in one.layer.maps]
        extent = one.x.shape[-dims:]
        if min(m.size(n) for m, n in zip(maps, extent, strict=True)) < 1:
            continue
        if dims == 3 and any(n < m.kernel for m, n in zip(maps, extent, strict=True)):
            continue  # Torch refuses to average images that are smaller than the kernel in 3-D only.
        generator = np.random.default_rng(seed)
        options = {
            "stride": [m.stride for m in maps],
            "padding": [m.pad_lo for m in maps],
            "ceil_mode": ceil,
        }
        kernel, x = [m.kernel for m in maps], batched(one.x, dims)
        if kind == "max_pool":
            layer: brute.Layer = brute.MaxPool(maps, generator)
            y = MAX_POOLS[dims](x, kernel, dilation=[m.dilation for m in maps], **options)
        else:
            include = rng.random() < 0.5
            layer = brute.AveragePool(maps, generator, include)
            y = AVERAGE_POOLS[dims](x, kernel, count_include_pad=include, **options)
        compare(layer, one.x, y)


@pytest.mark.parametrize("dims", [1, 2, 3])
@FEW
@given(SEEDS)
def test_adaptive_pooling_is_torchs(dims: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        one = case("adaptive_pool", dims, rng)
        maps: list[Adaptive] = list(one.layer.maps)  # type: ignore[arg-type]
        y = ADAPTIVE_POOLS[dims](batched(one.x, dims), [m.output for m in maps])
        compare(one.layer, one.x, y)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@FEW
@given(SEEDS)
def test_padding_and_cropping_is_torchs(mode: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        n, lo, hi = rng.randint(2, 12), rng.randint(-5, 11), rng.randint(-5, 11)
        inside = n + min(0, lo) + min(0, hi)
        # Torch reflects less than the image and wraps at most once around what is left of it.
        if (
            inside < 1
            or (mode == "reflect" and max(lo, hi) >= n)
            or (mode == "circular" and max(lo, hi) > inside)
        ):
            continue
        if n + lo + hi < 1:
            continue
        x = np.random.default_rng(seed).standard_normal(n)
        expected = F.pad(torch.from_numpy(x)[None, None], (lo, hi), mode=mode)[0, 0].numpy()
        map_ = Padded(lo, hi, mode)
        assert map_.size(n) == len(expected)
        made = np.zeros(len(expected))
        for s in filling(map_, 0, len(expected), n):
            made[slice(*s.at)] = x[slice(*s.source)][:: -1 if s.reversed else 1]
        assert np.array_equal(made, expected), map_


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "cubic"])
@FEW
@given(SEEDS)
def test_taps_are_the_matrix_of_torchs_interpolation(mode: str, dtype: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        extent = (rng.randint(1, 40),)
        drawn = resizes(rng, extent)[0]
        n = extent[0]
        names = {"linear": "linear", "cubic": "bicubic"}
        align = {"align_corners": rng.random() < 0.5} if mode in names else {}
        map_ = Resize(drawn.outputs, mode, align.get("align_corners", False), drawn.scale)
        eye = torch.eye(n, dtype=getattr(torch, dtype))[:, None]
        size, scale = (None, drawn.scale) if drawn.scale else (drawn.outputs, None)
        if mode == "cubic":
            wide = eye[..., None].expand(n, 1, n, 3).contiguous()
            y = F.interpolate(
                wide,
                size=(size, 3) if size else None,
                scale_factor=(scale, 1.0) if scale else None,
                mode="bicubic",
                **align,
            )[:, 0, :, 0]
        else:
            y = F.interpolate(eye, size=size, scale_factor=scale, mode=names.get(mode, mode), **align)[:, 0]
        matrix = np.zeros((map_.outputs, n))
        for row, (index, weight) in enumerate(map_.taps(0, map_.outputs, n, dtype)):
            for at, w in zip(index, weight, strict=True):
                matrix[row, at] += w
        error = np.abs(matrix - y.T.numpy()).max(axis=1)
        if mode.startswith("nearest"):
            # Which pixel a tie takes depends on whether the processor fuses multiply and add.
            half = 0.0 if mode == "nearest" else 0.5
            ratio = 1 / map_.scale if map_.scale else n / map_.outputs
            x = (np.arange(map_.outputs) + half) * ratio
            assert (error[np.abs(x - np.round(x)) > 1e-5] == 0).all(), (map_, n)
        else:
            assert error.max() <= {"float32": 3e-6, "float64": 2e-14}[dtype], (map_, n)
