"""From a Keras model to its graph: walk, describe, check."""

from __future__ import annotations

from dataclasses import replace

from shardwise.graph.capture import build
from shardwise.graph.example import Example
from shardwise.graph.graph import Graph
from shardwise.graph.keras.check import check as compare
from shardwise.graph.keras.module import KerasModule, same_device
from shardwise.graph.keras.walk import walk


def capture_keras(module: KerasModule, example: Example, *, training: bool, check: bool) -> Graph:
    """Capture a Keras model; the check compares with Keras itself, dropout aside."""
    module.train(training)
    graph = build(walk(module, example))
    if not check or not example.real or same_device(module.model).type == "meta":
        return replace(graph, notes=(*graph.notes, "self-check skipped: not wanted, or there is no data"))
    compare(module, example, graph)
    return graph
