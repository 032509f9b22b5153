"""Activations: as layers, and as the last step of other layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from keras import activations, layers
from torch.nn import functional as F

from shardwise.graph import functional
from shardwise.graph.errors import Opaque
from shardwise.graph.keras.flow import Flow, Scribe
from shardwise.graph.keras.registry import rule

# Keras's function -> torch's, with the settings that make them the same.
_PLAIN: dict[Callable[..., Any], tuple[Callable[..., Any], tuple[Any, ...]]] = {
    activations.linear: (functional.identity, ()),
    activations.relu: (F.relu, ()),
    activations.relu6: (F.relu6, ()),
    activations.elu: (F.elu, ()),
    activations.celu: (F.celu, ()),
    activations.selu: (F.selu, ()),
    activations.leaky_relu: (F.leaky_relu, (0.2,)),
    activations.silu: (F.silu, ()),
    activations.gelu: (F.gelu, ()),
    activations.mish: (F.mish, ()),
    activations.sigmoid: (torch.sigmoid, ()),
    activations.log_sigmoid: (F.logsigmoid, ()),
    activations.tanh: (torch.tanh, ()),
    activations.hard_sigmoid: (F.hardsigmoid, ()),
    activations.hard_silu: (F.hardswish, ()),
    activations.hard_tanh: (F.hardtanh, ()),
    activations.softplus: (F.softplus, ()),
    activations.softsign: (F.softsign, ()),
    activations.tanh_shrink: (F.tanhshrink, ()),
    activations.exponential: (torch.exp, ()),
}
_NORMALISED = {activations.softmax: F.softmax, activations.log_softmax: F.log_softmax}


def activate(scribe: Scribe, function: Any, x: Flow, part: str = "activation") -> Flow:
    """Add an activation function behind a layer."""
    if function is None or function is activations.linear:
        return x
    if function in _NORMALISED:
        return x.made(scribe.add(_NORMALISED[function], x.ref, x.dim(-1), part=part))
    if function not in _PLAIN:
        raise Opaque(f"activation {getattr(function, '__name__', function)!r} is not one of Keras's own")
    target, settings = _PLAIN[function]
    return x.made(scribe.add(target, x.ref, *settings, part=part))


@rule(layers.Activation)
def _activation(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    return activate(scribe, layer.activation, x, part="")


@rule(layers.ReLU)
def _relu(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    if layer.threshold:
        raise Opaque("ReLU with a threshold")
    if layer.negative_slope and layer.max_value is not None:
        raise Opaque("ReLU with a slope and a maximum")
    if layer.negative_slope:
        return x.made(scribe.add(F.leaky_relu, x.ref, float(layer.negative_slope)))
    if layer.max_value is None:
        return x.made(scribe.add(F.relu, x.ref))
    if layer.max_value == 6:
        return x.made(scribe.add(F.relu6, x.ref))
    return x.made(scribe.add(torch.clamp, x.ref, 0.0, float(layer.max_value)))


@rule(layers.LeakyReLU)
def _leaky_relu(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    return x.made(scribe.add(F.leaky_relu, x.ref, float(layer.negative_slope)))


@rule(layers.ELU)
def _elu(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    return x.made(scribe.add(F.elu, x.ref, float(layer.alpha)))


@rule(layers.PReLU)
def _prelu(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    # Slopes may be shared along any dimensions, so this is Keras's own formula: relu(x) - alpha * relu(-x).
    x = scribe.order(x, moved=False)
    above = scribe.add(F.relu, x.ref, part="above")
    below = scribe.add(F.relu, scribe.add(torch.neg, x.ref, part="negative"), part="below")
    scaled = scribe.add(torch.mul, below, scribe.weight(layer.alpha), part="scaled")
    return x.made(scribe.add(torch.sub, above, scaled))


@rule(layers.Softmax)
def _softmax(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    if len(axes) != 1:
        raise Opaque("softmax over several dimensions")
    return x.made(scribe.add(F.softmax, x.ref, x.dim(axes[0])))
