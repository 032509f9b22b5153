"""Layers as the closed forms and the table of limits see them: a handful of numbers each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.geometry import Window
from shardwise.graph import Graph, Kind, Layer, Source

_SKIPPED = (Kind.INPUT, Kind.LOSS)


@dataclass(frozen=True, slots=True)
class Record:
    """One layer: sizes per sample, seconds per sample, and what bounds a split of it.

    Args:
        name: of the layer.
        x, y: elements of input and output per sample.
        w: elements of all parameters.
        channels, filters: of input and output; 0 where the layer has none to split.
        pixels: spatial extents of the input; empty for layers without.
        kernel: extents of the window; empty for layers that read only their own pixel.
        forward_seconds, backward_seconds: per sample.
        update_seconds: per iteration.
    """

    name: str
    x: float
    y: float
    w: float = 0.0
    channels: int = 0
    filters: int = 0
    pixels: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_seconds: float = 0.0

    def halo_x(self, grid: Sequence[int]) -> float:
        """Return the elements of one sample's input that go to one neighbour along each split dimension."""
        return self._halo(grid, self.channels)

    def halo_y(self, grid: Sequence[int]) -> float:
        """Return the same for the gradient of the output."""
        return self._halo(grid, self.filters)

    def _halo(self, grid: Sequence[int], depth: int) -> float:
        if not self.kernel or len(grid) > len(self.pixels):
            return 0.0
        # A grid of fewer dimensions cuts the last ones.
        parts = (1,) * (len(self.pixels) - len(grid)) + tuple(grid)
        local = [n / part for n, part in zip(self.pixels, parts, strict=True)]
        total = 0.0
        for i, part in enumerate(parts):
            if part > 1:
                face = math.prod(local[:i] + local[i + 1 :])
                total += self.kernel[i] // 2 * face * max(1, depth)
        return total


def records(
    graph: Graph, *, seconds_per_sample: float = 0.0, update_seconds: float = 0.0
) -> tuple[Record, ...]:
    """Return the records of a captured network.

    Args:
        graph: for any batch size.
        seconds_per_sample: forward and backward of the whole network, shared out over the layers in
            proportion to their operations, as ParaDL's script does it.
        update_seconds: weight update of the whole network, shared out by parameters.
    """
    layers = [layer for layer in graph.layers if layer.kind not in _SKIPPED and len(layer.outputs) == 1]
    flops = sum(layer.forward_flops + layer.backward_flops for layer in layers) or 1
    weights = sum(_weights(layer) for layer in layers) or 1
    return tuple(
        _record(layer, graph.batch, seconds_per_sample / flops, update_seconds / weights * _weights(layer))
        for layer in layers
    )


def _weights(layer: Layer) -> int:
    return sum(o.spec.numel for o in layer.operands if o.origin is Source.PARAMETER)


def _record(layer: Layer, batch: int, seconds_per_flop: float, update: float) -> Record:
    values = [o for o in layer.operands if o.origin is Source.VALUE]
    shape = values[0].spec.shape if values else ()
    maps = [axis.map for axis in values[0].access[2:]] if values else []
    windows = [m for m in maps if isinstance(m, Window)]
    weighted = layer.kind in (Kind.CONVOLUTION, Kind.TRANSPOSED, Kind.LINEAR)
    features = -1 if layer.kind is Kind.LINEAR else 1
    return Record(
        layer.name,
        sum(o.spec.numel for o in values) / batch,
        layer.spec.numel / batch,
        _weights(layer),
        shape[features] if weighted else (shape[1] if windows else 0),
        layer.shape[features] if weighted else (shape[1] if windows else 0),
        tuple(shape[2:]),
        tuple(w.kernel for w in windows) if len(windows) == len(shape) - 2 else (),
        layer.forward_flops * seconds_per_flop,
        layer.backward_flops * seconds_per_flop,
        update,
    )
