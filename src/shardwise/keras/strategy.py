"""HyPar-Flow's own vocabulary: a strategy, partitions, replicas, and layers per partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from shardwise.graph import Graph
from shardwise.plan import Plan, PlanError

Strategy = Literal["data", "model", "hybrid"]
STRATEGIES = ("data", "model", "hybrid")


def plan_of(
    strategy: Strategy,
    *,
    num_partitions: int = 1,
    num_replicas: int = 1,
    micro_batches: int = 1,
) -> Plan:
    """Return the plan for a strategy of HyPar-Flow.

    Args:
        strategy: `data` (replicas of the whole model), `model` (partitions of it) or `hybrid` (both).
        num_partitions: into how many parts of consecutive layers the model is cut.
        num_replicas: how many copies of it share the mini-batch out.
        micro_batches: into how many parts a replica's share is cut, to flow through the partitions.
    """
    if strategy not in STRATEGIES:
        raise PlanError("strategy", f"found {strategy!r}", f"use one of {', '.join(STRATEGIES)}")
    if strategy == "data" and num_partitions != 1:
        raise PlanError("num_partitions", f"found {num_partitions} with strategy 'data'", "use 'hybrid'")
    if strategy == "model" and num_replicas != 1:
        raise PlanError("num_replicas", f"found {num_replicas} with strategy 'model'", "use 'hybrid'")
    return Plan.parse(f"data={num_replicas} stages={num_partitions} micro_batches={micro_batches}")


def cut_names(model: Any, graph: Graph, counts: Sequence[int]) -> tuple[str, ...]:
    """Return where a network is cut so that its parts have the given numbers of Keras layers."""
    layers = [layer for layer in model.layers if type(layer).__name__ != "InputLayer"]
    if sum(counts) != len(layers) or min(counts) < 1:
        raise PlanError(
            "layers_per_partition",
            f"found {list(counts)}, which is {sum(counts)} layers",
            f"the model {model.name!r} has {len(layers)} layers besides its inputs",
        )
    names = []
    for i in range(1, len(counts)):
        first = layers[sum(counts[:i])].name
        found = next(
            (n.name for n in graph if n.name == first or n.name.startswith((f"{first}.", f"{first}/"))), None
        )
        if found is None:
            raise PlanError(
                "layers_per_partition", f"layer {first!r} computes nothing", "cut before another one"
            )
        names.append(found)
    return tuple(names)
