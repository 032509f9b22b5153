"""First values of variables that have no memory yet: drawn, or given by whoever assigns to them."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import torch
from torch import Tensor, nn

_FIRST = "_shardwise_first_values"


class Given:
    """Values that were assigned to a variable without memory, by `load_weights` for one."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self, shape: Any, dtype: Any = None) -> Tensor:
        """Return them as an initializer does."""
        return self.value


def empty(variable: Any, initializer: Any) -> None:
    """Give a variable a shape without memory, and remember how its first values are made."""
    value = torch.empty(variable.shape, dtype=getattr(torch, variable.dtype), device="meta")
    variable._value = nn.Parameter(value, requires_grad=variable.trainable)
    setattr(variable, _FIRST, initializer)
    variable._direct_assign = partial(_assign, variable)


def _assign(variable: Any, value: Tensor) -> None:
    if variable.value.is_meta:
        setattr(variable, _FIRST, Given(value.detach().clone()))
    else:
        type(variable)._direct_assign(variable, value)


def give(variable: Any, value: Tensor) -> None:
    """Let a variable have a tensor for its memory."""
    variable._value = nn.Parameter(value, requires_grad=variable.trainable and value.is_floating_point())
    vars(variable).pop("_direct_assign", None)
    forget(variable)


def maker_of(variable: Any) -> Any:
    """Return what makes the first values of a variable, or None where nothing does any more."""
    return vars(variable).get(_FIRST)


def forget(variable: Any) -> None:
    """Forget how first values are made: a rank has them now."""
    vars(variable).pop(_FIRST, None)


def first_values(variable: Any) -> Tensor:
    """Make the first values of a variable without memory."""
    maker = maker_of(variable)
    if maker is None:
        raise ValueError(
            f"variable {variable.path!r} has no values on this rank, nor an initializer: a model must be "
            "built inside of sw.keras.weightless(), and one that was trained so keeps its plan until "
            "sw.keras.gather(model)"
        )
    value: Tensor = keras.ops.convert_to_tensor(maker(variable.shape, dtype=variable.dtype))
    return value.detach()


def value_of(variable: Any) -> Tensor:
    """Return the values of a variable, its first ones if it has no memory."""
    value: Tensor = variable.value.detach()
    return first_values(variable) if value.is_meta else value
