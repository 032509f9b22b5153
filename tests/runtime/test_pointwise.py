"""Convolutions of single pixels as products equal torch's own."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.runtime import weights_later
from shardwise.runtime.rules import pointwise as module
from shardwise.runtime.rules.pointwise import is_table, pointwise
from shardwise.runtime.weights_later import Note, WeightsLater

LAST = torch.channels_last
LIMITS = {torch.float32: 2e-6, torch.float64: 1e-14}


def image(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    made = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return made.contiguous(memory_format=LAST)


def results(convolve: object, tensors: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    made = convolve(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None)
    return [made.detach(), *torch.autograd.grad(made, leaves, gradient)]


@settings(deadline=None)
@given(
    st.integers(1, 3),
    st.integers(2, 40),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_products_equal_convolutions(
    n: int, reads: int, makes: int, height: int, width: int, biased: bool, dtype: torch.dtype
) -> None:
    x = image((n, reads, height, width), dtype, 0)
    weight = torch.randn((makes, reads, 1, 1), dtype=dtype)
    tensors = [x, weight, torch.randn(makes, dtype=dtype)] if biased else [x, weight]
    gradient = torch.randn((n, makes, height, width), dtype=dtype)
    assert is_table(x)
    for found, expected in zip(
        results(pointwise, tensors, gradient),
        results(F.conv2d, [t.double() for t in tensors], gradient.double()),
        strict=True,
    ):
        assert found.shape == expected.shape
        most = max(1.0, float(expected.abs().max())) * (reads + makes + n * height * width) ** 0.5
        assert float((found - expected).abs().max()) <= LIMITS[dtype] * most


@pytest.mark.parametrize(("pixels", "library"), [(64, True), (2, False)])
def test_the_library_convolves_images_that_are_larger_than_kernels(pixels: int, library: bool) -> None:
    x, weight = image((1, 32, pixels, pixels), torch.float32, 0), torch.randn(32, 32, 1, 1)
    used = mock.Mock(side_effect=torch.mkldnn_convolution)
    with mock.patch.object(module.torch, "mkldnn_convolution", used):
        made = pointwise(x, weight, None)
    assert bool(used.call_count) == library
    assert made.is_contiguous(memory_format=LAST)
    assert torch.allclose(made, F.conv2d(x, weight), atol=1e-4)


@pytest.mark.parametrize("pixels", [64, 2])
def test_results_can_be_overwritten(pixels: int) -> None:
    x, weight = image((1, 32, pixels, pixels), torch.float32, 0), torch.randn(32, 32, 1, 1).requires_grad_()
    made = pointwise(x, weight, None).relu_()
    (found,) = torch.autograd.grad(made.sum(), [weight])
    (expected,) = torch.autograd.grad(F.conv2d(x, weight).relu().sum(), [weight])
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_only_dense_images_with_channels_last_are_tables() -> None:
    x = image((2, 4, 6, 6), torch.float32, 0)
    assert is_table(x)
    assert not is_table(x.contiguous())
    assert not is_table(x[:, :, 1:])
    assert not is_table(x.half())
    assert not is_table(x[:0])
    assert not is_table(torch.zeros(2, 4, 6))


def test_weights_that_are_put_off_are_left_to_who_puts_them_off() -> None:
    notes: list[Note] = []
    with WeightsLater(notes):
        assert not is_table(image((2, 4, 6, 6), torch.float32, 0))


@pytest.mark.parametrize("pixels", [64, 2])
def test_weights_that_are_put_off_are_products_too(pixels: int) -> None:
    x = image((2, 8, pixels, pixels), torch.float64, 0).requires_grad_()
    weight, bias = (torch.randn(s, dtype=torch.float64).requires_grad_() for s in ((5, 8, 1, 1), (5,)))
    notes: list[Note] = []
    with (
        WeightsLater(notes),
        mock.patch.object(weights_later, "gradients", wraps=weights_later.gradients) as used,
    ):
        made = F.conv2d(x, weight, bias, (1, 1), (0, 0), (1, 1), 1)
        gradient = torch.randn_like(made)
        made.backward(gradient)
        assert weight.grad is None
        for note in notes:
            note()
    assert used.call_count == 2
    expected = results(F.conv2d, [x.detach(), weight.detach(), bias.detach()], gradient)
    for found, want in zip((made, x.grad, weight.grad, bias.grad), expected, strict=True):
        assert torch.allclose(found, want, rtol=1e-11, atol=1e-11)


def test_gradients_that_nobody_wants_are_not_made() -> None:
    x, weight = image((1, 4, 6, 6), torch.float64, 0), torch.randn(3, 4, 1, 1, dtype=torch.float64)
    made = pointwise(x, weight.requires_grad_(), torch.zeros(3, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(made, [weight], torch.ones_like(made))
    assert torch.allclose(gradient[0, :, 0, 0], x.sum((0, 2, 3)))
    assert x.grad is None
