"""Drop the layers that nobody needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwise.graph import Layer
from shardwise.program.norms import updates_buffers


def alive(layers: Sequence[Layer], departures: Collection[str]) -> list[Layer]:
    """Return the layers that some departure depends on, and those that update buffers."""
    wanted = set(departures)
    result: list[Layer] = []
    for layer in reversed(layers):
        if layer.name in wanted or updates_buffers(layer):
            wanted.update(layer.inputs)
            result.append(layer)
    return result[::-1]
