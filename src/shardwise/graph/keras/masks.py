"""Masks on their way with tensors.

Inside of one graph, Keras made them arguments of the layers that read them: they are tensors like others. A
model inside of another does not know them when it is made; there they are carried by the tensors, and
given to the layers that ask, as Keras does with data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
from keras.src.backend.common.masking import get_keras_mask
from keras.src.ops.function import Function

from shardwise.graph.keras.flow import Flow, flows_in
from shardwise.graph.keras.symbolic import Inside, Symbols


def attached(flows: Sequence[Flow], given: Any) -> list[Flow]:
    """Let tensors carry the masks that are given for them, in their order."""
    if given is None:
        return list(flows)
    found = keras.tree.flatten(given)
    return [
        replace(flow, mask=mask) if mask is not None else flow
        for flow, mask in zip(flows, found, strict=True)
    ]


def unmasked(flow: Flow) -> Flow:
    """Return a tensor that carries no mask."""
    return flow if flow.mask is None else replace(flow, mask=None)


def explicit(symbol: Any) -> Any:
    """Return the mask that Keras's graph itself has for a tensor, or None."""
    return get_keras_mask(symbol)


def reads_masks(rule: Any) -> bool:
    """Tell whether a rule asks for the mask."""
    return "mask" in inspect.signature(rule).parameters


def filled_in(layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the masks that the tensors carry, where the layer asks for them."""
    wanted = list(layer.call_signature_parameters)
    tensors = {k: v for k, v in (dict(zip(wanted, args, strict=False)) | dict(kwargs)).items() if flows_in(v)}
    tensors = {k: v for k, v in tensors.items() if k != "mask" and not k.endswith("_mask")}
    result = dict(kwargs)
    for name, value in tensors.items():
        argument = "mask" if len(tensors) == 1 else f"{name}_mask"
        found = _carried(value)
        if found is not None and argument in wanted and result.get(argument) is None:
            result[argument] = found
    return result


def passed_on(
    layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[Inside], list[Flow]]
) -> list[Flow | None] | None:
    """Return the masks of a layer's outputs in order; `run` writes the steps of what computes them."""
    first = args[0] if args else next((v for v in kwargs.values() if flows_in(v)), None)
    before = kwargs.get("mask") if kwargs.get("mask") is not None else _carried(first)
    if not layer.supports_masking or not flows_in(before):
        return None
    if type(layer).compute_mask is keras.layers.Layer.compute_mask:
        return list(keras.tree.flatten(before))
    symbols = Symbols()
    found = layer.compute_mask(symbols.of(keras.tree.map_structure(_bare, first)), symbols.of(before))
    outputs = keras.tree.flatten(found)
    known = [output for output in outputs if output is not None]
    if not known:
        return None
    made = iter(run(Inside(Function(symbols.made, known), symbols.flows)))
    return [None if output is None else next(made) for output in outputs]


def _bare(item: Any) -> Any:
    return unmasked(item) if isinstance(item, Flow) else item


def _carried(tree: Any) -> Any:
    """Return the masks that the tensors of an argument carry, or None if there are none."""
    found = keras.tree.map_structure(lambda item: item.mask if isinstance(item, Flow) else None, tree)
    return found if flows_in(found) else None
