"""One file per family of Keras layers: how a call of each becomes torch functions."""

from shardwise.graph.keras import describe
from shardwise.graph.keras.layers import (
    activation,
    convolution,
    dense,
    dropout,
    merge,
    normalisation,
    operations,
    pooling,
    shape,
)

__all__ = [
    "activation",
    "convolution",
    "dense",
    "describe",
    "dropout",
    "merge",
    "normalisation",
    "operations",
    "pooling",
    "shape",
]
