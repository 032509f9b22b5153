"""Run a captured graph unsplit, layer by layer, on real tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.graph.graph import Graph
from shardwise.graph.layer import Device, Kind, Layer, Literal, ModuleTarget, Ref, Source
from shardwise.graph.trace import transform


def run(
    graph: Graph,
    inputs: Sequence[Tensor],
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module] | None = None,
) -> Any:
    """Compute what the model returns for `inputs`.

    Args:
        graph: captured for exactly the shapes of the inputs.
        inputs: one tensor per input of the graph, in order.
        tensors: parameters and buffers by name; buffers are updated as the model would.
        modules: the model's modules by path; needed only for opaque layers.
    """
    values = dict(zip((layer.name for layer in graph.inputs), inputs, strict=True))
    last = {name: layer.name for layer in graph for name in layer.inputs}
    for name in graph.output_names:
        last.pop(name, None)
    for layer in graph:
        if layer.kind is Kind.INPUT:
            continue
        operands = [
            values[o.source] if o.origin is Source.VALUE else held(graph, tensors, o.source)
            for o in layer.operands
        ]
        values[layer.name] = call(layer, operands, modules or {})
        for name in layer.inputs:
            if last.get(name) == layer.name:
                values.pop(name, None)

    def leaf(item: Any) -> Any:
        if isinstance(item, Literal):
            return item.value
        return values[item] if isinstance(item, str) else item

    return transform(graph.outputs, leaf)


def held(graph: Graph, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a parameter, buffer or constant by name."""
    tensor = tensors.get(name)
    return graph.constants[name] if tensor is None else tensor


def call(layer: Layer, operands: Sequence[Any], modules: Mapping[str, nn.Module]) -> Any:
    """Compute one whole layer as the user's own code does."""
    if layer.call is None:
        raise ValueError(f"layer {layer.name!r} ({layer.op}) has no call to run")
    device = next((o.device for o in operands if isinstance(o, Tensor)), torch.get_default_device())

    def leaf(item: Any) -> Any:
        if isinstance(item, Ref):
            return operands[item.index]
        return device if isinstance(item, Device) else item

    args = transform(layer.call.args, leaf)
    kwargs = transform(dict(layer.call.kwargs), leaf)
    target = layer.call.target
    if isinstance(target, ModuleTarget):
        state = {
            local: operands[i]
            for local in layer.attributes["state"]
            for i, o in enumerate(layer.operands)
            if o.role == local
        }
        return torch.func.functional_call(modules[target.path], state, args, kwargs)
    return target(*args, **kwargs)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name, as `run` takes them."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
