"""What: capture of PyTorch and Keras models into a graph of layers."""

from shardwise.graph.capture import capture
from shardwise.graph.coverage import Coverage
from shardwise.graph.errors import CaptureError, SizeError
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
from shardwise.graph.loss import capture_loss

__all__ = [
    "DEVICE",
    "Call",
    "CaptureError",
    "Coverage",
    "Device",
    "Graph",
    "Kind",
    "Layer",
    "Literal",
    "ModuleTarget",
    "Operand",
    "Ref",
    "SizeError",
    "Source",
    "TensorSpec",
    "capture",
    "capture_loss",
]
