"""One function for every way to write a call: methods, operators, in-place forms, aten overloads.

`out_of_place` finds for a traced target the plain function that computes the same without overwriting
anything; `name_of` finds the name under which the rules in `normalise/` know a function.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.graph import functional

# Methods that are no functions of the same name, or mean something else there.
_METHODS: dict[str, Callable[..., Any]] = {
    "copy": functional.copy,
    "__setitem__": functional.setitem,
}
_FILLS: dict[str, Callable[..., Any]] = {
    "zero_": torch.zeros_like,
    "fill_": functional.fill,
    "copy_": functional.copy,
    "__setitem__": functional.setitem,
    "data.copy_": functional.copy,
}
_OPERATORS: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.imatmul: operator.matmul,
    operator.setitem: functional.setitem,
}
# Same name, other argument order or other meaning: aten overloads that have rules of their own.
_ATEN_OWN = {"batch_norm", "dropout", "alpha_dropout", "feature_dropout", "slice", "select", "pad", "split"}
_ATEN_OWN |= {"native_batch_norm", "convolution", "layer_norm", "group_norm", "instance_norm"}
_NAMESPACES = (torch, F, torch.special, torch.linalg, torch.fft)


def method(name: str) -> Callable[..., Any]:
    """Return the function that computes what the tensor method `name` does."""
    if name in _METHODS:
        return _METHODS[name]
    return functional.Method(name)


def out_of_place(target: Any) -> tuple[Any, bool]:
    """Return the out-of-place function for a target and whether the original overwrote its first argument."""
    if target in _OPERATORS:
        return _OPERATORS[target], True
    if isinstance(target, functional.Method):
        return _method_out_of_place(target)
    if isinstance(target, torch._ops.OpOverload):
        return _overload_out_of_place(target)
    name = getattr(target, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and _is_torch(target):
        for space in _NAMESPACES:
            if name.rstrip("_") in vars(space):
                return getattr(space, name.rstrip("_")), True
        return functional.OutOfPlace(name), True
    return target, False


def _method_out_of_place(target: functional.Method) -> tuple[Any, bool]:
    name = target.name
    if name in _FILLS:
        return _FILLS[name], True
    if name.startswith("__i") and name.endswith("__") and f"i{name[3:-2]}" in vars(operator):
        return _OPERATORS.get(getattr(operator, f"i{name[3:-2]}"), target), True
    if not name.endswith("_") or name.endswith("__") or name == "requires_grad_":
        return target, False
    plain = name.rstrip("_")
    if plain in dir(torch.Tensor) and plain not in {"bernoulli", "normal", "uniform", "random"}:
        return functional.Method(plain), True
    return functional.OutOfPlace(name), True


def _overload_out_of_place(target: torch._ops.OpOverload) -> tuple[Any, bool]:
    schema = target._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    name = schema.name.split("::")[-1]
    if not written or not name.endswith("_"):
        return target, False
    if name in _FILLS:
        return _FILLS[name], True
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    if packet is not None and target._overloadname in packet.overloads():
        return getattr(packet, target._overloadname), True
    return functional.OutOfPlace(name), True


def plain(target: Any) -> Any:
    """Return torch's function for an aten overload where there is one, since that can be pickled."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[-1]
        return vars(torch).get(name, target)
    return target


def _is_torch(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    if module.startswith(("torch", "shardwise.graph.")) or module in {"_operator", "operator", "math"}:
        return True
    name = getattr(target, "__name__", "")
    return any(vars(space).get(name) is target for space in (torch, torch._C._nn, builtins, math))


def name_of(target: Any) -> str:
    """Return the name that rules know a target by, or "" if it is the user's own function."""
    if isinstance(target, (functional.Method, functional.OutOfPlace)):
        return target.name
    if isinstance(target, torch._ops.OpOverload):
        name = str(target._schema.name.split("::")[-1])
        return f"aten.{name}" if name in _ATEN_OWN else name
    if not _is_torch(target):
        return ""
    name = str(getattr(target, "__name__", ""))
    if vars(torch).get(name) is target and name in _ATEN_OWN - {"split", "select"}:
        return f"aten.{name}"
    return name
