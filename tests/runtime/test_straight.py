"""What takes gradients with channels first only gets them so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.runtime.rules.straight import straight

LAST = torch.channels_last


def gradients(x: Tensor, gradient: Tensor, wrap: bool) -> tuple[Tensor, ...]:
    x, weight = x.detach().requires_grad_(), torch.arange(1.0, 9.0, dtype=x.dtype).requires_grad_()
    made = F.instance_norm(x, None, None, weight, None)
    return torch.autograd.grad(straight(made) if wrap else made, [x, weight], gradient)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_instance_norm_of_images_with_channels_last(samples: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gradient = (torch.randn(samples, 8, 6, 5, dtype=dtype) for _ in range(2))
    expected = gradients(x, gradient, wrap=False)
    turned = gradients(x.contiguous(memory_format=LAST), gradient.contiguous(memory_format=LAST), wrap=True)
    for found, want in zip(turned, expected, strict=True):
        assert torch.allclose(found, want, rtol=1e-5, atol=1e-5)


def test_what_is_made_can_be_overwritten_and_comes_in_parts() -> None:
    x = torch.randn(1, 4, 3, 3, requires_grad=True)
    first, number, flat = straight((x * 2, 5, x.sum()))
    assert number == 5
    assert flat.grad_fn is not None
    first.relu_()
    first.backward(torch.ones(1, 4, 3, 3).contiguous(memory_format=LAST))
    assert torch.equal(x.grad, 2.0 * (x.detach() > 0))
