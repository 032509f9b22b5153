"""What: capture of PyTorch and Keras models into a graph of layers."""

from shardwise.graph.graph import Graph
from shardwise.graph.layer import Call, Kind, Layer, Operand, Ref, Source, TensorSpec

__all__ = ["Call", "Graph", "Kind", "Layer", "Operand", "Ref", "Source", "TensorSpec"]
