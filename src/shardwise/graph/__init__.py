"""What: capture of PyTorch and Keras models into a graph of layers."""

from shardwise.graph.capture import capture
from shardwise.graph.errors import CaptureError
from shardwise.graph.graph import Graph
from shardwise.graph.layer import (
    DEVICE,
    Call,
    Device,
    Kind,
    Layer,
    Literal,
    ModuleTarget,
    Operand,
    Ref,
    Source,
    TensorSpec,
)

__all__ = [
    "DEVICE",
    "Call",
    "CaptureError",
    "Device",
    "Graph",
    "Kind",
    "Layer",
    "Literal",
    "ModuleTarget",
    "Operand",
    "Ref",
    "Source",
    "TensorSpec",
    "capture",
]
