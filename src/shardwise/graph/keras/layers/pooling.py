"""Pooling with windows and over everything."""

from __future__ import annotations

from typing import Any

import torch
from keras import layers
from torch.nn import functional as F

from shardwise.graph.errors import Opaque
from shardwise.graph.keras import functional
from shardwise.graph.keras.flow import Flow, Scribe
from shardwise.graph.keras.layers.convolution import each
from shardwise.graph.keras.registry import rule

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@rule(layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D)
def _max_pool(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    return _pool(scribe, layer, x, _MAX, functional.same_max_pool)


@rule(layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D)
def _avg_pool(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    return _pool(scribe, layer, x, _AVG, functional.same_avg_pool)


def _pool(scribe: Scribe, layer: Any, x: Flow, valid: Any, same: Any) -> Flow:
    x = scribe.channels_first(x, layer.data_format)
    rank = x.rank - 2
    kernel = each(layer.pool_size, rank)
    stride = kernel if layer.strides is None else each(layer.strides, rank)
    if layer.padding == "same":
        return x.made(scribe.add(same, x.ref, kernel, stride))
    return x.made(scribe.add(valid[rank], x.ref, kernel, stride))


@rule(layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D, layers.GlobalAveragePooling3D)
def _global_average(scribe: Scribe, layer: Any, x: Flow, mask: Any = None) -> Flow:
    if mask is not None:
        raise Opaque("an average over what a mask leaves")
    return _global(scribe, layer, x, torch.mean)


@rule(layers.GlobalMaxPooling1D, layers.GlobalMaxPooling2D, layers.GlobalMaxPooling3D)
def _global_max(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    return _global(scribe, layer, x, torch.amax)


def _global(scribe: Scribe, layer: Any, x: Flow, target: Any) -> Flow:
    x = scribe.channels_first(x, layer.data_format)
    dims = tuple(range(2, x.rank))
    return x.made(scribe.add(target, x.ref, dims, layer.keepdims), moved=x.moved and layer.keepdims)
