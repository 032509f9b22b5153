"""The variables of a Keras model by name, and how torch functions see each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
from keras import layers

from shardwise.graph.keras.views import AS_IS, DENSE, View, conv_view, depthwise_view


@dataclass(frozen=True, eq=False, slots=True)
class Named:
    """A Keras variable: its unique name, its view, and whether it is a weight (or state, like averages)."""

    name: str
    variable: Any
    view: View
    is_weight: bool
    is_trained: bool


def named_variables(model: Any) -> list[Named]:
    """Return all variables of a model in its own order; names are Keras's paths, made unique."""
    views, weights = _views(model), _weights(model)
    trained = {id(v) for v in model.trainable_variables}
    result: list[Named] = []
    uses: dict[str, int] = {}
    for variable in model.variables:
        path = variable.path.replace(".", "_")
        uses[path] = uses.get(path, 0) + 1
        name = path if uses[path] == 1 else f"{path}#{uses[path]}"
        key = id(variable)
        result.append(Named(name, variable, views.get(key, AS_IS), key in weights, key in trained))
    return result


def _all_layers(model: Any) -> Iterator[Any]:
    yield from model._flatten_layers()


def _weights(model: Any) -> set[int]:
    """Find what was made to be trained, also where it is frozen now."""
    return {id(v) for layer in _all_layers(model) for v in layer._trainable_variables}


def _views(model: Any) -> dict[int, View]:
    result: dict[int, View] = {}
    for layer in _all_layers(model):
        for variable, view in _layer_views(layer):
            if variable is not None:
                result[id(variable)] = view
    return result


def _layer_views(layer: Any) -> list[tuple[Any, View]]:
    if not layer.built:
        return []
    if isinstance(layer, layers.Dense) and is_plain(layer):
        return [(layer.kernel, DENSE)]
    if isinstance(layer, _SEPARABLE):
        rank = layer.rank
        return [(layer.depthwise_kernel, depthwise_view(rank)), (layer.pointwise_kernel, conv_view(rank))]
    if isinstance(layer, _DEPTHWISE):
        return [(layer.kernel, depthwise_view(layer.rank))]
    if isinstance(layer, (*_CONV, *_TRANSPOSED)) and is_plain(layer):
        return [(layer.kernel, conv_view(layer.rank))]
    return []


_CONV = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
_TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
_DEPTHWISE = (layers.DepthwiseConv1D, layers.DepthwiseConv2D)
_SEPARABLE = (layers.SeparableConv1D, layers.SeparableConv2D)


def is_plain(layer: Any) -> bool:
    """Tell whether a layer's kernel is one variable: neither quantised nor with low-rank additions."""
    mode = layer.quantization_mode
    return (
        mode is None
        and not getattr(layer, "lora_enabled", False)
        and isinstance(layer.kernel, keras.Variable)
    )
