"""From a Keras model to its graph: walk (else export, else run it whole), describe, check."""

from __future__ import annotations

from dataclasses import replace

from shardwise.graph.capture import build
from shardwise.graph.errors import CaptureError
from shardwise.graph.example import Example
from shardwise.graph.graph import Graph
from shardwise.graph.keras.check import check as compare
from shardwise.graph.keras.exported import trace_exported
from shardwise.graph.keras.module import KerasModule
from shardwise.graph.keras.walk import walk
from shardwise.graph.trace import Trace


def capture_keras(module: KerasModule, example: Example, *, training: bool, check: bool) -> Graph:
    """Capture a Keras model; the check compares with Keras itself, dropout aside."""
    module.train(training)
    graph = build(_trace(module, example))
    if not check or not example.real or any(v.value.is_meta for v in module.model.variables):
        return replace(graph, notes=(*graph.notes, "self-check skipped: not wanted, or there is no data"))
    compare(module, example, graph)
    return graph


def _trace(module: KerasModule, example: Example) -> Trace:
    try:
        return walk(module, example)
    except CaptureError as refusal:
        first = refusal.what
    try:
        return trace_exported(module, example)
    except CaptureError as refusal:
        return walk(module, example, whole=f"{first}; torch.export: {refusal.what}")
