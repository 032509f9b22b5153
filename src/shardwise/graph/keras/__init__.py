"""Capture of Keras models (Keras 3 on the torch backend) to the same graph; see README.md."""

from shardwise.graph.keras.module import KerasModule, wrap

__all__ = ["KerasModule", "wrap"]
