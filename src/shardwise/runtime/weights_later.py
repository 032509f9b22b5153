"""Put the weights' part of a backward pass off, for schedules that fill bubbles with it.

While this mode is on, convolutions and linear layers whose weights are trained run as functions of our own.
Their backward gives only the gradient of the input, which another stage waits for, and leaves a note; the
weights' part is done when the notes are worked off. Weights of other layers are cheap and not put off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.runtime.rules.pointwise import gradients, is_single, is_table, product


@dataclass(frozen=True)
class Note:
    """The weights' part of one backward, and the gradient that it will read."""

    gradient: Tensor
    part: Callable[[], None]

    def __call__(self) -> None:
        """Add to the gradients of the weights."""
        with torch.no_grad():
            self.part()


class WeightsLater(TorchFunctionMode):
    """Collect the weights' parts of everything that is computed inside."""

    def __init__(self, notes: list[Note], made: Tensor | None = None) -> None:
        """Collect into `notes`; `made` is the result of the one convolution inside, if it exists already."""
        super().__init__()
        self.notes, self.made = notes, made

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        nd = _CONVOLUTIONS.get(func)
        if nd is not None and not kwargs and len(args) == 7 and _trained(args[1]):
            x, weight, bias, stride, padding, dilation, groups = args
            settings = [_each(stride, nd), _each(padding, nd), _each(dilation, nd), int(groups)]
            return _Convolution.apply(x, weight, bias, settings, self.notes, (self.made,))  # type: ignore[no-untyped-call]
        if func is F.linear and not kwargs and len(args) == 3 and _trained(args[1]):
            return _Linear.apply(*args, self.notes)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


def _trained(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.is_leaf and weight.requires_grad


def _each(value: Any, nd: int) -> list[int]:
    return [int(value)] * nd if isinstance(value, int) else [int(v) for v in value]


def _add(parameter: Tensor, grad: Tensor | None) -> None:
    if grad is None or not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad


class _Convolution(torch.autograd.Function):
    """A convolution whose backward stops at its input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: list[Any],
        notes: list[Note],
        made: tuple[Tensor | None],
    ) -> Tensor:
        stride, padding, dilation, groups = settings
        ctx.save_for_backward(x)
        # Parameters may change only after the backward pass, so they need no saving.
        ctx.weight, ctx.bias, ctx.settings, ctx.notes = weight, bias, settings, notes
        ctx.single = is_single(weight, (stride, padding), groups) and is_table(x)
        if made[0] is not None:
            return made[0]
        if ctx.single:
            return product(x, weight, bias)
        none = [0] * len(stride)
        out: Tensor = torch.ops.aten.convolution(
            x, weight, bias, stride, padding, dilation, False, none, groups
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (x,) = grads, ctx.saved_tensors
        weight, bias, settings = ctx.weight, ctx.bias, ctx.settings
        stride, padding, dilation, groups = settings
        none = [0] * len(stride)
        single = ctx.single

        def part(mask: list[bool]) -> Any:
            if single:
                return gradients(grad, x, weight, mask)
            sizes = None if bias is None else list(bias.shape)
            return torch.ops.aten.convolution_backward(
                grad, x, weight, sizes, stride, padding, dilation, False, none, groups, mask
            )

        def later() -> None:
            _, for_weight, for_bias = part([False, True, bias is not None])
            _add(weight, for_weight)
            if bias is not None:
                _add(bias, for_bias)

        ctx.notes.append(Note(grad, later))
        for_input = part([True, False, False])[0] if ctx.needs_input_grad[0] else None
        return for_input, None, None, None, None, None


class _Linear(torch.autograd.Function):
    """A linear layer whose backward stops at its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, notes: list[Note]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.notes = weight, bias, notes
        return torch.ops.aten.linear(x, weight, bias)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (x,) = grads, ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias

        def later() -> None:
            rows = grad.reshape(-1, grad.shape[-1])
            _add(weight, rows.t() @ x.reshape(-1, x.shape[-1]))
            if bias is not None:
                _add(bias, rows.sum(0))

        ctx.notes.append(Note(grad, later))
        return grad @ weight if ctx.needs_input_grad[0] else None, None, None, None
