"""Plain functions for what torch offers only as a module, a method or a statement.

Layers refer to them in `Layer.call`; all can be pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree


@dataclass(frozen=True, slots=True)
class Method:
    """Call a method of the first argument: `Method("view")(x, 2, 3)` is `x.view(2, 3)`."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return getattr(first, self.name)(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class OutOfPlace:
    """Call an in-place method on a copy of the first argument and return the copy."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name.rstrip("_")

    def __call__(self, first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Copy, change the copy, return it."""
        copy = first.clone()
        getattr(copy, self.name)(*args, **kwargs)
        return copy


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    batch_statistics: bool,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """Normalise like `nn.BatchNorm2d`, the counter of batches and its cumulative average included."""
    factor = 0.0 if momentum is None else momentum
    if batch_statistics and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if momentum is None:
            factor = 1.0 / float(num_batches_tracked)
    return F.batch_norm(input, running_mean, running_var, weight, bias, batch_statistics, factor, eps)


def identity(input: Tensor) -> Tensor:
    """Return the input: what dropout is in evaluation."""
    return input


def take(input: Tensor, starts: Sequence[int], stops: Sequence[int], steps: Sequence[int]) -> Tensor:
    """Cut a regular part out of a tensor, one `(start, stop, step)` per dimension."""
    return input[tuple(slice(*cut) for cut in zip(starts, stops, steps, strict=True))]


def reshape(input: Tensor, shape: Sequence[int]) -> Tensor:
    """Give the elements another shape, in the same order."""
    return input.reshape(tuple(shape))


def copy(input: Tensor, source: Tensor) -> Tensor:
    """Return what `input.copy_(source)` makes of `input`."""
    return source.to(input.dtype).expand(input.shape).clone()


def fill(input: Tensor, value: Any) -> Tensor:
    """Return what `input.fill_(value)` makes of `input`."""
    return torch.empty_like(input).fill_(value)


def setitem(input: Tensor, index: Any, value: Any) -> Tensor:
    """Return what `input[index] = value` makes of `input`."""
    result = input.clone()
    result[index] = value
    return result


def largest(input: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return the values of `torch.max` along a dimension, its gradient going to one element."""
    return torch.max(input, dim, keepdim)[0]


def smallest(input: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    """Return the values of `torch.min` along a dimension, its gradient going to one element."""
    return torch.min(input, dim, keepdim)[0]


def pick(value: Any, index: int) -> Any:
    """Return tensor number `index` of the nested result of an opaque layer."""
    tensors = [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return tensors[index]
