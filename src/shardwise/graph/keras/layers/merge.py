"""Layers that join several tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import layers

from shardwise.graph.errors import Opaque
from shardwise.graph.keras.flow import Flow, Scribe
from shardwise.graph.keras.registry import rule

_JOINS: dict[type, Callable[..., Any]] = {
    layers.Add: torch.add,
    layers.Multiply: torch.mul,
    layers.Subtract: torch.sub,
    layers.Maximum: torch.maximum,
    layers.Minimum: torch.minimum,
    layers.Average: torch.add,
}


def together(scribe: Scribe, flows: Sequence[Flow]) -> list[Flow]:
    """Bring tensors of one rank to one order of dimensions."""
    if len({flow.rank for flow in flows}) > 1:
        raise Opaque("it joins tensors of different ranks")
    moved = any(flow.moved for flow in flows)
    return [scribe.order(flow, moved) for flow in flows]


@rule(*_JOINS)
def _join(scribe: Scribe, layer: Any, inputs: Sequence[Flow]) -> Flow:
    first, *others = together(scribe, inputs)
    target = next(_JOINS[base] for base in type(layer).__mro__ if base in _JOINS)
    ref = first.ref
    last = len(others) - 1
    average = target is torch.add and isinstance(layer, layers.Average)
    for i, other in enumerate(others):
        part = "" if i == last and not average else str(i)
        ref = scribe.add(target, ref, other.ref, part=part)
    if average:
        ref = scribe.add(torch.div, ref, float(len(inputs)))
    return first.made(ref)


@rule(layers.Concatenate)
def _concatenate(scribe: Scribe, layer: Any, inputs: Sequence[Flow]) -> Flow:
    flows = together(scribe, inputs)
    refs = [flow.ref for flow in flows]
    return flows[0].made(scribe.add(torch.cat, refs, flows[0].dim(layer.axis)))
