"""The order of images in memory: what makes them, who decides, and which kernels follow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwise.graph import capture
from shardwise.graph.attach import attach
from shardwise.plan import Plan
from shardwise.program.lowered import lower
from shardwise.runtime.order import FIRST, LAST, SETTING, fastest, memory_code, order_of
from shardwise.runtime.rules.convolution import _Stepped, _Turned
from shardwise.training.loss_graph import loss_graph

CPU = torch.device("cpu")
SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=5).map(tuple)


@settings(deadline=None)
@given(SHAPES, st.sampled_from([FIRST, LAST]))
def test_a_row_becomes_the_tensor_it_was_made_of(shape: tuple[int, ...], order: object) -> None:
    tensor = torch.randn(shape)
    row = order.row(tensor)
    assert row.shape == (tensor.numel(),)
    assert torch.equal(order.shaped(row, shape), tensor)


@settings(deadline=None)
@given(SHAPES, st.sampled_from([FIRST, LAST]))
def test_what_is_made_can_be_sent_without_a_copy(shape: tuple[int, ...], order: object) -> None:
    for made in (order.zeros(shape, torch.float64, CPU), order.arranged(torch.randn(shape))):
        assert tuple(made.shape) == shape
        if made.numel():
            assert order.row(made).data_ptr() == made.data_ptr()


def test_only_images_are_turned() -> None:
    assert LAST.empty((2, 3, 4, 5), torch.float32, CPU).stride() == (60, 1, 15, 3)
    assert LAST.empty((2, 3, 4), torch.float32, CPU).is_contiguous()
    assert LAST.empty((2, 3, 4, 5, 6), torch.float32, CPU).is_contiguous()


def _program(model: nn.Module, size: int) -> object:
    x = torch.zeros(1, 4, size, size)
    graph = capture(model, x, training=True, check=False)
    ending = loss_graph(F.mse_loss, graph.output_specs, x)
    return lower(attach(graph, ending), Plan.parse("data=1")).stage(0, 0, 0)


@pytest.mark.parametrize(("size", "turned"), [(32, True), (2, False)])
def test_kernels_larger_than_their_images_keep_channels_first(size: int, turned: bool) -> None:
    model = nn.Conv2d(4, 4, 3, padding=1)
    before = model.weight.detach().clone()
    program = _program(model, size)
    LAST.settle(program.ops, dict(model.named_parameters()), program.width)
    assert model.weight.is_contiguous(memory_format=torch.channels_last) == turned
    assert torch.equal(model.weight, before)


def test_channels_first_leaves_kernels_alone() -> None:
    model = nn.Conv2d(4, 4, 3, padding=1)
    program = _program(model, 32)
    FIRST.settle(program.ops, dict(model.named_parameters()), program.width)
    assert model.weight.is_contiguous()


def _convolution() -> object:
    return capture(nn.Conv2d(4, 4, 3), torch.zeros(1, 4, 8, 8), training=True, check=False)


def test_an_order_can_be_named_by_the_call_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _convolution()
    assert order_of("last", graph, CPU, 0, float) == LAST
    monkeypatch.setenv(SETTING, "last")
    assert order_of("auto", graph, CPU, 0, float) == LAST
    assert order_of("first", graph, CPU, 0, float) == FIRST
    with pytest.raises(ValueError, match=r"memory_order: found 'diagonal'; expected auto, first, last"):
        order_of("diagonal", graph, CPU, 0, float)


def test_ranks_that_were_told_different_orders_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 1 was told 'first', rank 0 uses 'last'"):
        order_of("first", _convolution(), CPU, 1, lambda mine: 1.0 + mine)


def test_memory_codes_tell_orders_apart_but_not_sizes_of_one() -> None:
    kernel = torch.zeros(4, 3, 2, 2)
    assert memory_code(kernel) == memory_code(torch.zeros(8, 5, 7, 7))
    assert memory_code(kernel) != memory_code(LAST.arranged(kernel))
    single = torch.zeros(4, 3, 1, 1)
    assert memory_code(single) == memory_code(LAST.arranged(single))


def test_all_ranks_follow_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    graph = _convolution()
    assert order_of("auto", graph, CPU, 1, lambda mine: 1.0 + mine) == LAST
    assert order_of("auto", graph, CPU, 1, lambda mine: 0.0 + mine) == FIRST


def test_networks_without_images_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    graph = capture(nn.Linear(4, 4), torch.zeros(2, 4), training=True, check=False)

    def nobody(_: float) -> float:
        raise AssertionError("asked without need")

    assert order_of("auto", graph, CPU, 0, nobody) is FIRST


def test_double_precision_stays_channels_first() -> None:
    assert fastest(CPU, torch.float64) is FIRST


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_every_second_pixel_keeps_the_order_of_the_image(form: torch.memory_format) -> None:
    steps = (..., slice(None, None, 2), slice(None, None, 2))
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64).contiguous(memory_format=form).requires_grad_()
    y = x.detach().clone().requires_grad_()
    picked, sliced = _Stepped.apply(x, steps), y[steps]
    assert torch.equal(picked, sliced)
    gradient = torch.randn_like(picked)
    picked.backward(gradient)
    sliced.backward(gradient)
    assert torch.equal(x.grad, y.grad)
    assert x.grad.is_contiguous(memory_format=form)


@pytest.mark.parametrize("bias", [True, False])
def test_a_large_kernel_convolves_with_channels_first_between_images_with_channels_last(bias: bool) -> None:
    settings = [[1, 2], [1, 0], [1, 1], False, [0, 0], 1]
    x = LAST.arranged(torch.randn(2, 3, 7, 6, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(5, 3, 3, 3, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(5, dtype=torch.float64, requires_grad=True) if bias else None
    others = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, shift)]
    made = _Turned.apply(x, weight, shift, settings)
    expected = F.conv2d(*others, stride=(1, 2), padding=(1, 0))
    assert torch.allclose(made, expected, rtol=1e-13, atol=1e-13)
    gradient = torch.randn_like(made)
    made.backward(gradient)
    expected.backward(gradient)
    for mine, other in zip((x, weight, shift), others, strict=True):
        if mine is not None:
            assert torch.allclose(mine.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
