"""Dense layers: over the last dimension, wherever the channels are."""

from __future__ import annotations

from typing import Any

from keras import layers
from torch.nn import functional as F

from shardwise.graph.errors import Opaque
from shardwise.graph.keras.flow import Flow, Scribe
from shardwise.graph.keras.layers.activation import activate
from shardwise.graph.keras.layers.convolution import computes_plainly
from shardwise.graph.keras.registry import rule
from shardwise.graph.keras.variables import is_plain


@rule(layers.Dense)
def _dense(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    computes_plainly(layer)
    if not is_plain(layer):
        raise Opaque("its kernel is not one variable")
    x = scribe.order(x, moved=False)
    y = x.made(scribe.add(F.linear, x.ref, scribe.weight(layer.kernel), scribe.weight(layer.bias)))
    return activate(scribe, layer.activation, y)


@rule(layers.Embedding)
def _embedding(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    if layer.mask_zero or not is_table(layer) or "int" not in x.dtype:
        raise Opaque("an embedding with a mask, or of numbers that are no integers")
    return x.made(scribe.add(F.embedding, x.ref, scribe.weight(layer._embeddings)))


def is_table(layer: Any) -> bool:
    """Tell whether an embedding is one table of weights."""
    plain = layer.quantization_mode is None and not layer.lora_enabled
    return plain and layer.compute_dtype == layer.variable_dtype
