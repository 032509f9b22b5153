"""Execution rules, one small file per family of layers."""

from shardwise.runtime.rules import convolution, dense, losses, normalisation, pooling, reduction, shape
from shardwise.runtime.rules.registry import Run, bind, rule

__all__ = [
    "Run",
    "bind",
    "convolution",
    "dense",
    "losses",
    "normalisation",
    "pooling",
    "reduction",
    "rule",
    "shape",
]
