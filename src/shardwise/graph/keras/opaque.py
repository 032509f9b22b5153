"""Layers without a rule: Keras's own call, on whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch
from keras.src.backend.common.stateless_scope import StatelessScope
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from shardwise.graph.keras.variables import Named


@dataclass(frozen=True, slots=True)
class Slot:
    """Stand for a tensor argument by its number."""

    index: int


@dataclass(frozen=True, eq=False)
class KerasCall:
    """Call a Keras operation with given tensors as its inputs and as its variables.

    The call gets the inputs, then the variables; those that it changes (averages, seeds) change in place.
    Where its code `decides` by its data, the shapes of what it returns are found by running it on zeros.
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: int
    variables: tuple[Named, ...] = ()
    decides: bool = False

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the operation."""
        given, held = tensors[: self.inputs], tensors[self.inputs :]
        args, kwargs = fill((self.args, dict(self.kwargs)), given)
        if not any(isinstance(t, FakeTensor) for t in tensors):
            return self._run(args, kwargs, held)
        try:
            if not self._draws and not self.decides:
                return self._run(args, kwargs, held)
            return self._shape_only(args, kwargs, tensors, zeros=self.decides)
        except (DataDependentOutputException, GuardOnDataDependentSymNode):
            return self._shape_only(args, kwargs, tensors, zeros=True)

    def _run(self, args: Any, kwargs: Any, held: Sequence[Tensor]) -> Any:
        """Call Keras's code, and put what it changed where it belongs."""
        values = [
            entry.view.invert(tensor, tuple(entry.variable.shape))
            for entry, tensor in zip(self.variables, held, strict=True)
        ]
        mapping = [(entry.variable, value) for entry, value in zip(self.variables, values, strict=True)]
        with StatelessScope(state_mapping=mapping) as scope:
            result = self.operation(*args, **kwargs)
        with torch.no_grad():
            for entry, value in zip(self.variables, values, strict=True):
                now = scope.get_current_value(entry.variable)
                if now is not value and now is not None:
                    value.copy_(now)
        return result

    @property
    def _draws(self) -> bool:
        return any(not e.variable.value.is_floating_point() for e in self.variables)

    def _shape_only(self, args: Any, kwargs: Any, tensors: Sequence[Tensor], *, zeros: bool) -> Any:
        """Return tensors of the right shapes: without data nothing can be drawn or decided."""
        if zeros:
            spec = specs_of_zeros(self.operation, args, kwargs)
        else:
            spec = output_spec(self.operation, *keras.tree.map_structure(_symbol, (args, kwargs)))
        link = sum((t.sum() * 0 for t in tensors if t.is_floating_point()), start=torch.zeros(()))

        def make(item: Any) -> Tensor:
            return torch.zeros(item.shape, dtype=getattr(torch, item.dtype)) + link.to(
                getattr(torch, item.dtype)
            )

        return keras.tree.map_structure(make, spec)


def output_spec(operation: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation makes of symbols, as symbols."""
    if not getattr(operation, "_call_has_training_arg", True):
        kwargs = {key: value for key, value in kwargs.items() if key != "training"}
    return operation.compute_output_spec(*args, **kwargs)


def specs_of_zeros(operation: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operation makes of zeros as symbols; its variables stay as they are."""

    def zeros(item: Any) -> Any:
        if not isinstance(item, (Tensor, keras.KerasTensor)):
            return item
        dtype = getattr(torch, str(item.dtype).removeprefix("torch."))
        return torch.zeros(tuple(map(int, item.shape)), dtype=dtype)

    with unset_fake_temporarily(), torch.no_grad(), StatelessScope():
        given = keras.tree.map_structure(zeros, (args, kwargs))
        return keras.tree.map_structure(_symbol, operation(*given[0], **given[1]))


def _symbol(item: Any) -> Any:
    if isinstance(item, Tensor):
        return keras.KerasTensor(tuple(item.shape), dtype=str(item.dtype).removeprefix("torch."))
    return item


def fill(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Put tensors in the places of slots."""
    return keras.tree.map_structure(lambda a: tensors[a.index] if isinstance(a, Slot) else a, tree)
