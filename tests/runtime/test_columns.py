"""The compiled passes of batch norm compute what torch's operators do."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.runtime import columns
from shardwise.runtime.columns import affine, combine, moments, one_pass, products

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 70), st.lists(st.integers(1, 40), max_size=3)).map(
    lambda sizes: (sizes[0], sizes[1], *sizes[2])
)
ORDERS = st.sampled_from(["first", "last", "gaps"])
DTYPES = st.sampled_from([torch.float32, torch.float64])


def tensor(shape: tuple[int, ...], order: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)) + 3.0
    if order == "last":
        dims = (0, *range(2, len(shape)), 1)
        return made.permute(dims).contiguous().permute((0, len(shape) - 1, *range(1, len(shape) - 1)))
    return made.repeat_interleave(2, -1)[..., ::2] if order == "gaps" else made


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    most = float(expected.abs().max())
    return float((found.double() - expected).abs().max()) <= most * (
        1e-5 if dtype is torch.float32 else 1e-13
    )


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(shutil.which("cc") is None, reason="without a C compiler there are none to install")
def test_the_compiled_passes_are_installed() -> None:
    assert columns.native()


@settings(deadline=None)
@given(SHAPES, ORDERS, ORDERS, DTYPES, st.integers(0, 9))
def test_passes_equal_their_formulas(
    shape: tuple[int, ...], order: str, other: str, dtype: torch.dtype, seed: int
) -> None:
    x, gradient = tensor(shape, order, dtype, seed), tensor(shape, other, dtype, seed + 10)
    wide, slope_of = x.double(), gradient.double()
    dims, count = (0, *range(2, x.ndim)), x.numel() // x.shape[1]
    mean = wide.mean(dims)
    sums = moments(x)
    assert close(sums[0] / count, mean, dtype)
    variance = (sums[1] + sums[2] - sums[0] * sums[0] / count) / count
    assert float((variance - wide.var(dims, correction=0)).abs().max()) <= (
        1e-5 if dtype is torch.float32 else 1e-13
    )
    scale, shift, slope = (tensor((x.shape[1],), "first", torch.float64, seed + i) for i in range(3))

    def spread(row: torch.Tensor) -> torch.Tensor:
        return row.view(1, -1, *(1,) * (x.ndim - 2))

    assert close(affine(x, scale, shift), wide * spread(scale) + spread(shift), dtype)
    centre = mean.to(dtype)
    pair = products(gradient, x, centre)
    assert close(pair[0], slope_of.sum(dims), dtype)
    size = float((slope_of * (wide - spread(centre.double()))).abs().sum(dims).max())
    second = (slope_of * (wide - spread(centre.double()))).sum(dims)
    assert float((pair[1] - second).abs().max()) <= size * (1e-5 if dtype is torch.float32 else 1e-13)
    expected = slope_of * spread(scale) - wide * spread(slope) - spread(shift)
    before = gradient.clone()
    assert close(combine(gradient, x, scale, slope, shift, own=False), expected, dtype)
    assert torch.equal(gradient, before)
    assert close(combine(gradient, x, scale, slope, shift, own=True), expected, dtype)


@settings(deadline=None)
@given(SHAPES, ORDERS, ORDERS, DTYPES, st.integers(0, 9))
def test_rectifying_passes_equal_two(
    shape: tuple[int, ...], order: str, other: str, dtype: torch.dtype, seed: int
) -> None:
    x, gradient = tensor(shape, order, dtype, seed) - 3.0, tensor(shape, other, dtype, seed + 10)
    rows = [tensor((x.shape[1],), "first", torch.float64, seed + i) for i in range(4)]
    scale, shift, slope, mean = rows[0], rows[1] - 3.0, rows[2], rows[3].to(dtype)
    made = affine(x, scale, shift)
    assert torch.equal(affine(x, scale, shift, True), torch.relu(made))
    passed = torch.where(made > 0, gradient, 0.0)
    if not one_pass(x):
        return
    gate = (scale, shift)
    assert torch.allclose(products(gradient, x, mean, gate), products(passed, x, mean), rtol=1e-6, atol=1e-4)
    joined = combine(passed, x, scale, slope, shift, False)
    assert torch.equal(combine(gradient, x, scale, slope, shift, False, gate), joined)
    assert torch.equal(combine(gradient, x, scale, slope, shift, True, gate), joined)


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize(
    "cut", [(slice(None), slice(2, 9)), (slice(1, 6), slice(None)), (slice(1, 6), slice(2, 9))]
)
@pytest.mark.parametrize("rectify", [False, True])
def test_results_can_be_made_inside_wider_tensors(
    order: str, cut: tuple[slice, slice], rectify: bool
) -> None:
    wide = tensor((2, 5, 7, 11), order, torch.float64, 0).fill_(7.0)
    place = wide[:, :, cut[0], cut[1]]
    x = tensor(tuple(place.shape), order, torch.float64, 1) - 3.0
    scale, shift = torch.rand(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    expected = affine(x, scale, shift, rectify)
    assert affine(x, scale, shift, rectify, place).data_ptr() == place.data_ptr()
    assert torch.equal(place, expected)
    place.fill_(7.0)
    assert torch.equal(wide, torch.full_like(wide, 7.0))


def test_numbers_that_are_none_stay_so() -> None:
    x = torch.full((1, 3, 4, 4), float("nan"))
    row = torch.ones(3, dtype=torch.float64)
    assert affine(x, row, row, True).isnan().all()
    assert combine(torch.ones_like(x), x, row, row, row, False, (row, row)).isnan().all()


def test_without_the_library_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gradient = (tensor((2, 5, 7, 6), "first", torch.float64, seed) for seed in range(2))
    row = torch.rand(5, dtype=torch.float64)

    def all_of_them() -> list[torch.Tensor]:
        sums = moments(x)
        variance = sums[1] + sums[2] - sums[0] * sums[0] / 84
        made = affine(x, row, row), products(gradient, x, row), combine(gradient, x, row, row, row, False)
        return [sums[0], variance, *made]

    compiled = all_of_them()
    monkeypatch.setenv(columns.SETTING, "0")
    assert not columns.native()
    for found, expected in zip(all_of_them(), compiled, strict=True):
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_ranks_with_several_threads_use_torch() -> None:
    torch.set_num_threads(2)
    assert not columns.native()


def test_a_mean_far_from_zero_costs_no_digits_of_the_variance() -> None:
    x = torch.randn(1, 3, 300, 200, generator=torch.Generator().manual_seed(0)) + 1000.0
    sums = moments(x)
    variance = (sums[1] + sums[2] - sums[0] * sums[0] / 60000) / 60000
    expected = x.double().var((0, 2, 3), correction=0)
    assert float(((variance - expected) / expected).abs().max()) < 1e-5


def test_a_part_without_pixels_adds_nothing() -> None:
    x = torch.zeros(2, 3, 0, 4)
    assert float(moments(x).abs().sum()) == 0.0
    assert float(products(x, x, torch.zeros(3)).abs().sum()) == 0.0


@given(st.floats(1e-3, 1e6), st.sampled_from(["first", "last"]), st.integers(1, 40), st.integers(1, 60))
@settings(deadline=None)
def test_constant_channels_have_no_variance(value: float, order: str, channels: int, pixels: int) -> None:
    x = tensor((2, channels, pixels, 50), order, torch.float32, 0).fill_(value)
    sums, count = moments(x), 2 * pixels * 50
    assert float(sums[1].abs().max()) == 0.0
    assert float((sums[0] / count / x[0, 0, 0, 0] - 1).abs().max()) < 1e-12
    assert float((sums[2] - sums[0] * sums[0] / count).abs().max()) <= 1e-12 * float(sums[2].max())
