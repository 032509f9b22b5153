"""Let the parts of an opaque layer's result be read as one: whoever takes one tensor of it takes it whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.geometry.access import WHOLE
from shardwise.graph import Layer


def whole_results(layers: Sequence[Layer]) -> list[Layer]:
    """Describe layers that pick one tensor of a nested result as readers of all of it.

    A value has one layout, the one of its first tensor. An opaque layer is computed whole, on every rank, so
    all that matters is that its result never travels before it is taken apart.
    """
    several = {layer.name: layer.outputs[0] for layer in layers if len(layer.outputs) > 1}
    result = []
    for layer in layers:
        if any(source in several for source in layer.inputs):
            operands = tuple(
                replace(o, spec=several[o.source], access=(WHOLE,) * len(several[o.source].shape))
                if o.source in several
                else o
                for o in layer.operands
            )
            layer = replace(layer, operands=operands)
        result.append(layer)
    return result
