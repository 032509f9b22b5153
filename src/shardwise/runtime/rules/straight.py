"""Gradients in the order in memory that torch makes, for computations that take no other.

The gradient of torch's instance norm is wrong for a single sample if what it is given lies with channels
last: it is read as if it had channels first. Code of the user's own may do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def straight(made: Any) -> Any:
    """Return what was made, whose gradients will come with channels first."""
    if isinstance(made, tuple | list) and type(made) in (tuple, list):
        return type(made)(straight(part) for part in made)
    if not isinstance(made, Tensor) or made.ndim < 3 or not made.requires_grad:
        return made
    return _Straight.apply(made)  # type: ignore[no-untyped-call]


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].contiguous()
