"""Keras's operations outside of layers: `x + y`, `keras.ops.relu(x)`, and what a symbolic call reveals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch
from keras.src.ops import nn as nn_ops
from keras.src.ops import numpy as numpy_ops
from torch import Tensor
from torch.nn import functional as F

from shardwise.graph.errors import Opaque
from shardwise.graph.keras.flow import Flow, Scribe
from shardwise.graph.keras.layers.merge import together
from shardwise.graph.keras.layers.normalisation import along
from shardwise.graph.keras.registry import rule

_BINARY: dict[type, Callable[..., Any]] = {
    numpy_ops.Add: torch.add,
    numpy_ops.Subtract: torch.sub,
    numpy_ops.Multiply: torch.mul,
    numpy_ops.TrueDivide: torch.div,
    numpy_ops.Divide: torch.div,
    numpy_ops.Maximum: torch.maximum,
    numpy_ops.Minimum: torch.minimum,
    numpy_ops.Power: torch.pow,
}
_UNARY: dict[type, Callable[..., Any]] = {
    nn_ops.Relu: F.relu,
    nn_ops.Relu6: F.relu6,
    nn_ops.Sigmoid: torch.sigmoid,
    nn_ops.Silu: F.silu,
    nn_ops.Softplus: F.softplus,
    numpy_ops.Tanh: torch.tanh,
    numpy_ops.Exp: torch.exp,
    numpy_ops.Log: torch.log,
    numpy_ops.Sqrt: torch.sqrt,
    numpy_ops.Square: torch.square,
    numpy_ops.Absolute: torch.abs,
    numpy_ops.Negative: torch.neg,
}


@rule(*_BINARY)
def _binary(scribe: Scribe, operation: Any, x1: Any, x2: Any) -> Flow:
    target = next(_BINARY[base] for base in type(operation).__mro__ if base in _BINARY)
    if isinstance(x1, Flow) and isinstance(x2, Flow):
        if x1.dtype != x2.dtype:
            raise Opaque(f"it combines {x1.dtype} and {x2.dtype}")
        left, right = together(scribe, (x1, x2))
        return left.made(scribe.add(target, left.ref, right.ref))
    first = isinstance(x1, Flow)
    flow: Flow = x1 if first else x2
    other = _operand(scribe, flow, x2 if first else x1)
    if not isinstance(other, (int, float)):
        flow = scribe.order(flow, moved=False)
    if target in (torch.maximum, torch.minimum) and isinstance(other, (int, float)):
        other = scribe.constant(torch.tensor(other, dtype=getattr(torch, flow.dtype)))
    return flow.made(scribe.add(target, *((flow.ref, other) if first else (other, flow.ref))))


def _operand(scribe: Scribe, flow: Flow, value: Any) -> Any:
    """Refer to what a tensor is combined with: a variable, a number, or a constant tensor."""
    if isinstance(value, keras.Variable):
        if str(value.dtype) != flow.dtype or value.ndim > flow.rank:
            raise Opaque(f"it combines {flow.dtype} and {value.dtype}")
        return scribe.weight(value)
    if isinstance(value, (int, float)) and "float" in flow.dtype:
        return value
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
    if str(tensor.dtype).removeprefix("torch.") != flow.dtype:
        raise Opaque(f"it combines {flow.dtype} and {tensor.dtype}")
    return scribe.constant(along(scribe.order(flow, moved=False), tensor.detach()))


@rule(*_UNARY)
def _unary(scribe: Scribe, operation: Any, x: Flow) -> Flow:
    if "float" not in x.dtype:
        raise Opaque(f"it computes with {x.dtype}")
    target = next(_UNARY[base] for base in type(operation).__mro__ if base in _UNARY)
    return x.made(scribe.add(target, x.ref))
