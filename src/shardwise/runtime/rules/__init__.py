"""Execution rules, one small file per family of layers."""

from shardwise.runtime.rules import (
    adaptive,
    convolution,
    dense,
    dropout,
    losses,
    normalisation,
    opaque,
    pooling,
    reduction,
    resize,
    shape,
    transposed,
)
from shardwise.runtime.rules.registry import Run, bind, placed_rule, rule
from shardwise.runtime.rules.surroundings import Surroundings

__all__ = [
    "Run",
    "Surroundings",
    "adaptive",
    "bind",
    "convolution",
    "dense",
    "dropout",
    "losses",
    "normalisation",
    "opaque",
    "placed_rule",
    "pooling",
    "reduction",
    "resize",
    "rule",
    "shape",
    "transposed",
]
