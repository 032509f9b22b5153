"""From a Keras model to its graph: walk, describe, check."""

from __future__ import annotations

from dataclasses import replace

from shardwise.graph import functional
from shardwise.graph.capture import build, self_check, untouched
from shardwise.graph.example import Example
from shardwise.graph.graph import Graph
from shardwise.graph.keras.module import KerasModule, same_device, without_dropout
from shardwise.graph.keras.walk import walk
from shardwise.graph.layer import Kind, Layer


def capture_keras(module: KerasModule, example: Example, *, training: bool, check: bool) -> Graph:
    """Capture a Keras model; the check compares with Keras itself, dropout aside."""
    module.train(training)
    graph = build(walk(module, example))
    if not check or not example.real or same_device(module.model).type == "meta":
        return replace(graph, notes=(*graph.notes, "self-check skipped: not wanted, or there is no data"))
    with untouched(module), without_dropout(module.model):
        self_check(module, example, replace(graph, layers=tuple(map(_undropped, graph.layers))))
    return graph


def _undropped(layer: Layer) -> Layer:
    if layer.kind is not Kind.DROPOUT or layer.call is None:
        return layer
    return replace(layer, call=replace(layer.call, target=functional.identity, args=layer.call.args[:1]))
