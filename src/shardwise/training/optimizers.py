"""Which optimizers can update a model that ranks share: those that need no more than what a rank holds.

step(closure)       wants to run the model itself, as often as it likes
norms of tensors    differ on slices: Adafactor, Muon, LAMB ...; seen by updating a matrix and its parts
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.geometry import Box
from shardwise.runtime.placement import Placement

STEPS = 2


def check_optimizer(optimizer: Optimizer, slices: Collection[str]) -> None:
    """Refuse an optimizer that would not update as on one device.

    Args:
        optimizer: made by the user's callable.
        slices: the parameters of which ranks hold slices.
    """
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer: {name}.step needs a closure that runs the model again, which a split step cannot "
            "offer; use one that updates from the gradients of one step, such as SGD or Adam"
        )
    if slices and any(_reads_whole(type(optimizer), group) for group in optimizer.param_groups):
        raise ValueError(
            f"optimizer: {name} updates an element by more of its tensor than the element's own gradient, "
            f"and ranks hold slices of {_some(slices)}; use an elementwise one such as SGD or Adam, or a "
            "plan without filter, channel or pairs"
        )


def sliced(placement: Placement, frozen: Collection[str]) -> list[str]:
    """Return the trained parameters of which some rank holds a slice."""
    return [
        name
        for name, boxes in placement.parameters.items()
        if name not in frozen and any(box != Box.whole(placement.shapes[name]) for box in boxes.values())
    ]


def _some(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} others"


def _reads_whole(kind: type[Optimizer], group: dict[str, Any]) -> bool:
    """Tell whether rows or columns of a matrix are updated otherwise alone than within it."""
    accepted = inspect.signature(kind).parameters
    settings = {key: value for key, value in group.items() if key in accepted and key != "params"}
    # A rate of zero, as before a warm-up, would hide every difference.
    settings |= {"lr": 0.1} if "lr" in accepted else {}
    generator = torch.Generator().manual_seed(0)
    value, *grads = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(1 + STEPS))
    try:
        whole = _updated(kind, settings, value, grads)
        halves = [
            torch.cat([_updated(kind, settings, *_half(i, dim, value, grads)) for i in range(2)], dim)
            for dim in range(2)
        ]
    except (TypeError, ValueError, RuntimeError, KeyError):
        return False  # an optimizer that is not made like torch's own tells nothing
    return not all(torch.allclose(whole, other, rtol=1e-9, atol=1e-12) for other in halves)


def _half(index: int, dim: int, value: Tensor, grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    part, *parts = (tensor.chunk(2, dim)[index].contiguous() for tensor in (value, *grads))
    return part, parts


def _updated(
    kind: type[Optimizer], settings: dict[str, Any], value: Tensor, grads: Sequence[Tensor]
) -> Tensor:
    parameter = nn.Parameter(value.clone())
    optimizer = kind([parameter], **settings)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()
