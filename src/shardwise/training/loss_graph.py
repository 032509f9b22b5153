"""Put the loss behind the network; a loss that cannot be captured becomes one layer on whole outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardwise.geometry.access import opaque
from shardwise.graph import (
    Call,
    CaptureError,
    Graph,
    Kind,
    Layer,
    Operand,
    Ref,
    Source,
    TensorSpec,
    capture_loss,
)
from shardwise.graph.example import spec_of
from shardwise.graph.graph import Shapes
from shardwise.graph.trace import leaves, transform

Loss = Callable[..., Any]


class WholeLoss:
    """A loss that is not to be captured: a callable that runs as one layer on whole outputs."""


def loss_graph(loss: Loss, outputs: Any, target: Any) -> Graph:
    """Return the graph of `loss(output, target)` for outputs and targets of these specs."""
    if isinstance(loss, WholeLoss):
        return _whole_loss(loss, outputs, target)
    try:
        return capture_loss(loss, outputs, target, check=False)
    except CaptureError:
        return _whole_loss(loss, outputs, target)


def _whole_loss(loss: Loss, outputs: Any, target: Any) -> Graph:
    """Describe a loss of which nothing is known: one layer that reads everything."""

    def spec(leaf: Any) -> Any:
        return spec_of(leaf) if isinstance(leaf, Tensor) else leaf

    specs = transform((outputs, target), spec)
    found = [leaf for leaf in leaves(specs) if isinstance(leaf, TensorSpec)]
    numbers = iter(range(len(found)))
    args = transform(specs, lambda leaf: Ref(next(numbers)) if isinstance(leaf, TensorSpec) else leaf)
    dtype = next(s.dtype for s in found if s.is_float)

    def build(shapes: Shapes) -> Graph:
        inputs = [
            Layer(
                f"input{i}",
                Kind.INPUT,
                "input",
                outputs=(TensorSpec(shape, s.dtype),),
                attributes={"index": i},
            )
            for i, (shape, s) in enumerate(zip(shapes, found, strict=True))
        ]
        operands = tuple(
            Operand(f"input{i}", layer.name, Source.VALUE, layer.spec, opaque(len(layer.shape)))
            for i, layer in enumerate(inputs)
        )
        value = Layer(
            "value",
            Kind.OTHER,
            "function",
            operands,
            (TensorSpec((), dtype),),
            call=Call(loss, args),
            reason="the loss could not be captured",
        )
        return Graph((*inputs, value), "value", {}, {}, rebuild=build, source="hand")

    return build(tuple(s.shape for s in found))
