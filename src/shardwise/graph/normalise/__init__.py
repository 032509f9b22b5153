"""One rule per family of functions: how a call becomes layers of known kinds."""

from shardwise.graph.normalise import (
    convolution,
    dropout,
    elementwise,
    joins,
    linear,
    losses,
    normalisation,
    pooling,
    reduction,
    reshape,
    resize,
    slices,
)
from shardwise.graph.normalise.registry import apply_rule, has_rule

__all__ = [
    "apply_rule",
    "convolution",
    "dropout",
    "elementwise",
    "has_rule",
    "joins",
    "linear",
    "losses",
    "normalisation",
    "pooling",
    "reduction",
    "reshape",
    "resize",
    "slices",
]
