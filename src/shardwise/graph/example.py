"""What the user gives as an example: tensors or specs, by position or by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.layer import TensorSpec
from shardwise.graph.trace import Result, leaves, transform


@dataclass(frozen=True)
class Example:
    """The arguments of one call of a model, with `Result(name)` leaves where the tensors go.

    Args:
        args, kwargs: the arguments; leaves that are no tensors stay as they are.
        names, specs: name and spec of every tensor, in order of the arguments.
        tensors: the given tensors; None where only a spec was given.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    tensors: tuple[Tensor | None, ...]

    def fill(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with `values` in the places of the tensors."""

        def leaf(item: Any) -> Any:
            return values[item.id] if isinstance(item, Result) else item

        return transform(self.args, leaf), transform(dict(self.kwargs), leaf)

    @property
    def real(self) -> bool:
        """Tell whether there is data for every tensor, or data can be made up."""
        return all(t is None or t.device.type != "meta" for t in self.tensors)

    def sample(self, device: torch.device) -> dict[str, Tensor]:
        """Return a tensor for every input: the given one, or random numbers (zeros for integers)."""
        generator = torch.Generator().manual_seed(0)
        result: dict[str, Tensor] = {}
        for name, spec, tensor in zip(self.names, self.specs, self.tensors, strict=True):
            if tensor is None:
                dtype = dtype_of(spec)
                tensor = torch.zeros(spec.shape, dtype=dtype)
                if dtype.is_floating_point:
                    tensor = torch.rand(spec.shape, generator=generator).to(dtype)
            result[name] = tensor.detach().to(device)
        return result


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return torch's dtype of a spec."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return shape and dtype of a tensor."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def read_example(forward: Callable[..., Any], example: Any) -> Example:
    """Bind an example (tensor, tuple, dict by argument name, or specs) to the arguments of `forward`."""
    signature = inspect.signature(forward)
    try:
        if isinstance(example, Mapping):
            bound = signature.bind(**example)
        else:
            bound = signature.bind(*(example if isinstance(example, (tuple, list)) else (example,)))
    except TypeError as error:
        raise ValueError(f"the example does not fit {signature}: {error}") from error
    names: list[str] = []
    found: list[Tensor | TensorSpec] = []
    arguments: dict[str, Any] = {}
    for argument, value in bound.arguments.items():
        count = sum(isinstance(v, (Tensor, TensorSpec)) for v in leaves(value))

        def leaf(item: Any, argument: str = argument, count: int = count) -> Any:
            if not isinstance(item, (Tensor, TensorSpec)):
                return item
            name = argument if count == 1 else f"{argument}_{_numbered(names, argument)}"
            names.append(name)
            found.append(item)
            return Result(name)

        arguments[argument] = transform(value, leaf)
    if not names:
        raise ValueError("the example holds no tensor: give a tensor, a tuple, or a dict by argument name")
    full = inspect.BoundArguments(signature, dict(arguments))
    specs = tuple(item if isinstance(item, TensorSpec) else spec_of(item) for item in found)
    tensors = tuple(None if isinstance(item, TensorSpec) else item for item in found)
    return Example(full.args, full.kwargs, tuple(names), specs, tensors)


def _numbered(names: list[str], argument: str) -> int:
    return sum(name.startswith(f"{argument}_") for name in names)
