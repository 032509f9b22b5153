"""Dropout of elements, channels and samples, and noise that is there only in training."""

from __future__ import annotations

from typing import Any

from keras import layers
from torch.nn import functional as F

from shardwise.graph.errors import Opaque
from shardwise.graph.functional import identity
from shardwise.graph.keras import functional
from shardwise.graph.keras.flow import Flow, Scribe
from shardwise.graph.keras.registry import rule

_CHANNELS = {1: F.dropout1d, 2: F.dropout2d, 3: F.dropout3d}


@rule(layers.Dropout)
def _dropout(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    if not scribe.training or not layer.rate:
        return x.made(scribe.add(identity, x.ref))
    shape = layer.noise_shape
    if shape is None:
        return x.made(scribe.add(F.dropout, x.ref, float(layer.rate), True))
    if shape[0] in (None, x.shape[0]) and all(n == 1 for n in shape[1:]):
        return x.made(scribe.add(functional.drop_samples, x.ref, float(layer.rate)))
    raise Opaque(f"dropout with the noise shape {tuple(shape)}")


@rule(layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D)
def _spatial_dropout(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    if not scribe.training or not layer.rate:
        return x.made(scribe.add(identity, x.ref))
    x = scribe.channels_first(x, getattr(layer, "data_format", "channels_last"))
    return x.made(scribe.add(_CHANNELS[x.rank - 2], x.ref, float(layer.rate), True))


@rule(layers.GaussianNoise, layers.GaussianDropout, layers.AlphaDropout)
def _noise(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    if scribe.training:
        raise Opaque("it draws noise of its own")
    return x.made(scribe.add(identity, x.ref))
