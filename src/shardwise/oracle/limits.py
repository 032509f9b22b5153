"""How far each strategy scales and what stops it: ParaDL's table, for a given network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.graph import Graph
from shardwise.oracle.records import Record, records

# ParaDL, Table V: (what, whether it is inherent or of frameworks and systems, strategies it holds for).
_ALL = ("data", "spatial", "pipeline", "filter", "channel", "data+filter", "data+spatial")
_HINDRANCES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("gradient exchange", "limit", ("data", "spatial", "data+filter", "data+spatial")),
    ("collectives in every layer", "limit", ("filter", "channel", "data+filter")),
    ("point-to-point messages", "bottleneck", ("spatial", "pipeline", "data+spatial")),
    ("congestion of shared links", "bottleneck", _ALL),
    ("input and staging of samples", "bottleneck", tuple(s for s in _ALL if s != "data")),
    ("redundant memory", "bottleneck", _ALL),
    ("memory fragmentation", "bottleneck", _ALL),
    ("weight update", "limit", _ALL),
    ("uneven stages", "limit", ("pipeline",)),
    ("kernels that do not shrink with the split", "bottleneck", ("filter", "channel", "data+filter")),
    ("number of ranks", "limit", _ALL),
)


@dataclass(frozen=True, slots=True)
class Limit:
    """How many PEs a strategy can use, which layer decides, and what hinders it.

    `limits` are inherent to the strategy, `bottlenecks` are those of frameworks and systems.
    """

    strategy: str
    max_ranks: int
    decided_by: str
    limits: tuple[str, ...]
    bottlenecks: tuple[str, ...]

    def __str__(self) -> str:
        hinders = ", ".join((*self.limits, *self.bottlenecks))
        return f"{self.strategy}: at most {self.max_ranks} ranks ({self.decided_by}); {hinders}"


def limits(network: Graph | Sequence[Record], batch: int) -> tuple[Limit, ...]:
    """Return the table of limits of a network for a global mini-batch."""
    layers = records(network) if isinstance(network, Graph) else tuple(network)
    tiles, tile_layer = _smallest(layers, lambda r: math.prod(r.pixels) if r.kernel else 0)
    width, filter_layer = _smallest(layers, lambda r: r.filters if r.w and r.filters else 0)
    weighted = [r for r in layers if r.w and r.channels]
    # The first layer is excluded: images have three channels and that layer stays whole.
    depth, channel_layer = _smallest(weighted[1:] or weighted, lambda r: r.channels)
    rows = (
        ("data", batch, "samples of the mini-batch"),
        ("spatial", tiles, f"pixels of {tile_layer}"),
        ("pipeline", len(layers), "number of layers"),
        ("filter", width, f"filters of {filter_layer}"),
        ("channel", depth, f"channels of {channel_layer}"),
        ("data+filter", batch * width, f"samples x filters of {filter_layer}"),
        ("data+spatial", batch * tiles, f"samples x pixels of {tile_layer}"),
    )
    return tuple(
        Limit(name, most, why, _of(name, "limit"), _of(name, "bottleneck")) for name, most, why in rows
    )


def _of(strategy: str, kind: str) -> tuple[str, ...]:
    return tuple(what for what, k, strategies in _HINDRANCES if k == kind and strategy in strategies)


def _smallest(layers: Sequence[Record], count: Callable[[Record], int]) -> tuple[int, str]:
    """Return the smallest positive count over the layers, and whose it is."""
    known = [(count(record), record.name) for record in layers]
    known = [pair for pair in known if pair[0] > 0]
    return min(known, key=lambda pair: pair[0], default=(1, "no layer"))
