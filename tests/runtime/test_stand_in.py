"""Gradients that autograd is handed on the way arrive as those that it is called with."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from shardwise.runtime.flow import add_gradient
from shardwise.runtime.segment import hand_over, stand_in


def gradients(handed: bool) -> Tensor:
    """Differentiate a tensor that has two names, another reader, and an operation with two results."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    y = x * 2
    outs = [y, y, y.relu(), *y.split(3, dim=1)]
    edges = [get_gradient_edge(out) for out in outs]
    given = [torch.randn_like(out) for out in outs]
    wanted = [stand_in(e, [g]) if handed else g for e, g in zip(edges, given, strict=True)]
    torch.autograd.backward(edges, wanted)
    assert x.grad is not None
    return x.grad


def test_gradients_that_are_handed_over_are_added_to_all_others() -> None:
    torch.testing.assert_close(gradients(handed=True), gradients(handed=False), rtol=0, atol=1e-15)


@pytest.mark.parametrize("handed", [True, False])
def test_a_gradient_is_let_go_of_as_soon_as_it_was_read(handed: bool) -> None:
    x = torch.randn(8, requires_grad=True)
    holder = [torch.randn(8)]
    gradient = weakref.ref(holder[0])
    gone: list[bool] = []
    middle = x.exp()
    middle.register_hook(lambda _: gone.append(gradient() is None))
    edge = get_gradient_edge(middle.sin())
    torch.autograd.backward([edge], [stand_in(edge, holder) if handed else holder.pop()])
    assert x.grad is not None
    assert holder == []
    assert gone == [handed]


@pytest.mark.parametrize("own", [True, False])
def test_a_gradient_is_added_where_autograd_passes_by(own: bool) -> None:
    def run(handed: bool) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
        middle = x * 2
        end = get_gradient_edge(middle.sin())
        given, gradient = (torch.randn(4, 6, dtype=torch.float64) for _ in range(2))
        before = gradient.clone()
        edge = get_gradient_edge(middle)
        if handed:
            hand_over(edge, [gradient], own)
            torch.autograd.backward([end], [given])
            assert torch.equal(gradient, before) == (not own)
        else:
            torch.autograd.backward([end, edge], [given, gradient])
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=1e-15)


def test_a_gradient_that_two_slots_share_is_not_added_to_in_place() -> None:
    both = torch.ones(3)
    grads = {"a": both, "b": both.view(3), "c": torch.ones(3)}
    kept = grads["c"]
    for slot in grads:
        add_gradient(grads, slot, torch.full((3,), 2.0))
    assert {slot: grad.tolist() for slot, grad in grads.items()} == dict.fromkeys("abc", [3.0] * 3)
    assert grads["c"] is kept
