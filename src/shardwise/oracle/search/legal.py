"""Refuse plans early: what a network cannot be split into, and mini-batches that are too small."""

from __future__ import annotations

from shardwise.graph import Graph, Kind
from shardwise.oracle.kernels import WEIGHTED
from shardwise.oracle.search.bounds import Bools, Rows
from shardwise.plan import Split, Way


class Legality:
    """Say why plans cannot be used, in words."""

    def __init__(self, graph: Graph, batch: int | None = None) -> None:
        inputs = [layer.shape for layer in graph.inputs]
        self.batch = batch or graph.batch
        self.extents = max(inputs, key=len)[2:] if inputs else ()
        weighted = [layer for layer in graph if layer.kind in WEIGHTED]
        self.layers = sum(1 for layer in graph if layer.kind is not Kind.INPUT)
        filters = max((layer.shape[_features(layer.kind)] for layer in weighted), default=0)
        self.most = {
            Way.FILTER: filters,
            Way.PAIRS: filters,
            Way.CHANNEL: max(
                (layer.operands[0].spec.shape[_features(layer.kind)] for layer in weighted), default=0
            ),
        }

    def of_split(self, split: Split) -> str:
        """Say why no stage can be split this way."""
        if split.way is Way.SPATIAL:
            if len(split.grid) > len(self.extents):
                return f"images have {len(self.extents)} spatial dimensions, the grid {split} has more"
            for n, parts in zip(self.extents, split.grid, strict=False):
                if parts > n:
                    return f"{parts} tiles along {n} pixels"
        if split.way in self.most and split.width > self.most[split.way]:
            what = "channels" if split.way is Way.CHANNEL else "filters"
            return f"no layer has the {split.width} {what} that {split} needs"
        return ""

    def of_sizes(self, stages: int, shares: int) -> str:
        """Say why a network and its mini-batch cannot be cut into so many stages and shares."""
        if stages > self.layers:
            return f"{stages} stages for {self.layers} layers"
        if shares > self.batch:
            return f"{self.batch} samples for {shares} shares (replicas x micro-batches)"
        return ""

    def of_rows(self, rows: Rows) -> Bools:
        """Tell which plans cannot be used for this reason."""
        return (rows.stages > self.layers) | (rows.data * rows.parts > self.batch)


def _features(kind: Kind) -> int:
    return -1 if kind is Kind.LINEAR else 1
