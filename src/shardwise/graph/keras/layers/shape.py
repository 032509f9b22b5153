"""Layers that move elements without computing."""

from __future__ import annotations

from typing import Any

import torch
from keras import layers
from torch.nn import functional as F

from shardwise.graph.errors import Opaque
from shardwise.graph.functional import identity
from shardwise.graph.keras import functional
from shardwise.graph.keras.flow import Flow, Scribe
from shardwise.graph.keras.layers.convolution import each
from shardwise.graph.keras.registry import rule


@rule(layers.Identity)
def _identity(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    return x.made(scribe.add(identity, x.ref))


@rule(layers.Flatten)
def _flatten(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    # Flattening Keras's channels_first means channels last, then in a row.
    x = scribe.order(x, moved=False)
    if layer.data_format == "channels_first" and x.rank > 2:
        x = x.made(scribe.add(torch.permute, x.ref, (0, *range(2, x.rank), 1), part="channels_last"))
    return x.made(scribe.add(functional.reshape_samples, x.ref, (-1,)), moved=False)


@rule(layers.Reshape)
def _reshape(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    target = tuple(layer.target_shape)
    rank = len(target) + 1
    if x.rank == 2 and rank > 2 and all(n == 1 for n in target[:-1]):
        # (n, c) to (n, 1, ..., 1, c): where the channels go is where the next layers want them.
        return Flow(scribe.add(functional.reshape_samples, x.ref, (target[-1], *target[:-1])), moved=True)
    x = scribe.order(x, moved=False)
    return x.made(scribe.add(functional.reshape_samples, x.ref, target), moved=False)


@rule(layers.Permute)
def _permute(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    x = scribe.order(x, moved=False)
    return x.made(scribe.add(torch.permute, x.ref, (0, *layer.dims)))


@rule(layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D)
def _zero_padding(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    x = scribe.channels_first(x, getattr(layer, "data_format", "channels_last"))
    return x.made(scribe.add(F.pad, x.ref, functional.flat(_pairs(layer.padding))))


@rule(layers.Cropping1D, layers.Cropping2D, layers.Cropping3D)
def _cropping(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    x = scribe.channels_first(x, getattr(layer, "data_format", "channels_last"))
    return x.made(scribe.add(functional.crop, x.ref, _pairs(layer.cropping)))


def _pairs(value: Any) -> tuple[tuple[int, int], ...]:
    if isinstance(value[0], int):
        return ((value[0], value[1]),)
    return tuple((pair[0], pair[1]) for pair in value)


@rule(layers.UpSampling1D, layers.UpSampling2D, layers.UpSampling3D)
def _up_sampling(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    interpolation = getattr(layer, "interpolation", "nearest")
    if interpolation not in ("nearest", "bilinear"):
        raise Opaque(f"up-sampling by {interpolation} interpolation")
    x = scribe.channels_first(x, getattr(layer, "data_format", "channels_last"))
    factors = tuple(float(n) for n in each(layer.size, x.rank - 2))
    aligned = None if interpolation == "nearest" else False
    return x.made(scribe.add(F.interpolate, x.ref, None, factors, interpolation, aligned))
