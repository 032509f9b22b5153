"""Batch, layer and group normalisation; rescaling and normalisation of inputs."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch
from keras import layers
from torch import Tensor
from torch.nn import functional as F

from shardwise.graph.errors import Opaque
from shardwise.graph.functional import Method
from shardwise.graph.keras import functional
from shardwise.graph.keras.flow import Flow, Scribe
from shardwise.graph.keras.layers.convolution import computes_plainly
from shardwise.graph.keras.registry import rule


@rule(layers.BatchNormalization)
def _batch_norm(scribe: Scribe, layer: Any, x: Flow, mask: Any = None) -> Flow:
    computes_plainly(layer)
    if getattr(layer, "synchronized", False) or getattr(layer, "renorm", False) or mask is not None:
        raise Opaque("batch normalisation with a mask, renormalisation or Keras's own synchronisation")
    axis = layer.axis % x.rank if isinstance(layer.axis, int) else -1
    if axis not in (1, x.rank - 1):
        raise Opaque(f"batch normalisation along dimension {layer.axis}")
    x = scribe.order(x, moved=axis == x.rank - 1 and x.rank > 2)
    settings = {
        "batch_statistics": scribe.training and layer.trainable,
        "momentum": 1.0 - layer.momentum,
        "eps": layer.epsilon,
    }
    tensors = (layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance)
    made = scribe.add(functional.keras_batch_norm, x.ref, *map(scribe.weight, tensors), options=settings)
    return x.made(made)


@rule(layers.LayerNormalization)
def _layer_norm(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    computes_plainly(layer)
    axes = [a % x.rank for a in (layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis])]
    if getattr(layer, "rms_scaling", False) or sorted(axes) != list(range(x.rank - len(axes), x.rank)):
        raise Opaque("layer normalisation that is not over the last dimensions")
    x = scribe.order(x, moved=False)
    sizes = tuple(x.shape[a] for a in sorted(axes))
    weight, bias = scribe.weight(layer.gamma), scribe.weight(layer.beta)
    return x.made(scribe.add(F.layer_norm, x.ref, sizes, weight, bias, layer.epsilon))


@rule(layers.GroupNormalization)
def _group_norm(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    computes_plainly(layer)
    if layer.axis % x.rank != x.rank - 1 or x.rank < 3:
        raise Opaque(f"group normalisation along dimension {layer.axis}")
    x = scribe.order(x, moved=True)
    groups = layer.groups if layer.groups != -1 else x.shape[-1]
    weight, bias = scribe.weight(layer.gamma), scribe.weight(layer.beta)
    return x.made(scribe.add(F.group_norm, x.ref, groups, weight, bias, layer.epsilon))


def along(x: Flow, tensor: Tensor) -> Tensor:
    """Give a constant the rank of a tensor that it is combined with, and its order of dimensions."""
    wide = tensor.reshape((1,) * (x.rank - tensor.ndim) + tuple(tensor.shape))
    return wide.movedim(-1, 1).contiguous() if x.moved else wide


def _affine(scribe: Scribe, x: Flow, factor: Any, offset: Any, dtype: str) -> Flow:
    """Add `x * factor + offset`, for numbers and for tensors."""
    kind = getattr(torch, dtype)
    if x.dtype != dtype:
        x = x.made(scribe.add(Method("to"), x.ref, kind, part="cast"))
    for target, value, part in ((torch.mul, factor, "scale"), (torch.add, offset, "")):
        tensor = torch.as_tensor(value, dtype=kind)
        other: Any = float(tensor) if not tensor.ndim else scribe.constant(along(x, tensor))
        x = x.made(scribe.add(target, x.ref, other, part=part))
    return x


@rule(layers.Rescaling)
def _rescaling(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    scale, offset = (np.asarray(v, dtype=layer.compute_dtype) for v in (layer.scale, layer.offset))
    if (scale.ndim or offset.ndim) and keras.config.image_data_format() == "channels_first":
        raise Opaque("rescaling of each channel, channels first")
    return _affine(scribe, x, scale, offset, layer.compute_dtype)


@rule(layers.Normalization)
def _normalization(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    if layer.invert or layer.mean is None:
        raise Opaque("normalisation that is inverted or not adapted yet")
    mean, variance = (keras.ops.convert_to_tensor(v).detach() for v in (layer.mean, layer.variance))
    dtype = getattr(torch, layer.compute_dtype)
    deviation = torch.maximum(variance.to(dtype).sqrt(), torch.tensor(keras.config.epsilon(), dtype=dtype))
    if x.dtype != layer.compute_dtype:
        x = x.made(scribe.add(Method("to"), x.ref, dtype, part="cast"))
    x = x.made(scribe.add(torch.sub, x.ref, scribe.constant(along(x, mean.to(dtype))), part="centre"))
    return x.made(scribe.add(torch.div, x.ref, scribe.constant(along(x, deviation))))
