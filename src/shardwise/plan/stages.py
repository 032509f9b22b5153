"""What a cut of the network means: the layers of every stage, the values that cross, the weights shared.

`cuts` are positions in `graph.layers`: of the first layer of each stage but the first. Model inputs belong
to no stage: every stage that reads one gets it from the data loader.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Sequence

from shardwise.graph import Graph, Kind, Layer
from shardwise.plan.edges import Edge


def stage_layers(graph: Graph, cuts: Sequence[int]) -> tuple[tuple[Layer, ...], ...]:
    """Return the layers of every stage, in order and without the model's inputs."""
    bounds = (0, *cuts, len(graph.layers))
    parts = (graph.layers[a:b] for a, b in itertools.pairwise(bounds))
    return tuple(tuple(layer for layer in part if layer.kind is not Kind.INPUT) for part in parts)


def stage_edges(
    graph: Graph, cuts: Sequence[int], targets: Collection[str] | None = None
) -> tuple[Edge, ...]:
    """Return the values that cross between stages: one edge for each stage that reads a value made earlier.

    Args:
        graph: the network.
        cuts: the first layer of each stage but the first.
        targets: the values that are wanted in the end; layers that none of them needs send nothing. The
            outputs of the model unless given.
    """
    wanted = set(graph.output_names if targets is None else targets)
    alive = _alive(graph, wanted)
    learns = _learns(graph)
    matters = _matters(graph, wanted, alive)
    edges: dict[tuple[str, int], bool] = {}
    for i, layer in enumerate(graph.layers):
        if layer.name not in alive:
            continue
        target = bisect.bisect_right(cuts, i)
        returns = layer.name in matters
        for source in layer.inputs:
            if graph[source].kind is Kind.INPUT or bisect.bisect_right(cuts, graph.index[source]) == target:
                continue
            edges[source, target] = edges.get((source, target), False) or (returns and source in learns)
    found = [
        Edge(value, bisect.bisect_right(cuts, graph.index[value]), target, differentiable)
        for (value, target), differentiable in edges.items()
    ]
    return tuple(sorted(found, key=lambda e: (e.source, e.target, graph.index[e.value])))


def shared_parameters(graph: Graph, cuts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that layers of more than one stage use, each with its stages.

    Their gradients are summed over all ranks that hold any of these stages.
    """
    users: dict[str, list[int]] = {}
    for stage, layers in enumerate(stage_layers(graph, cuts)):
        for name in dict.fromkeys(p for layer in layers for p in layer.parameters):
            users.setdefault(name, []).append(stage)
    return {name: tuple(stages) for name, stages in users.items() if len(stages) > 1}


def _alive(graph: Graph, wanted: Iterable[str]) -> set[str]:
    """Return the layers that the wanted values depend on, and these themselves."""
    alive = set(wanted)
    for layer in reversed(graph.layers):
        if layer.name in alive:
            alive.update(layer.inputs)
    return alive


def _learns(graph: Graph) -> set[str]:
    """Return the values that depend on a parameter which is trained, through floating-point values."""
    learns: set[str] = set()
    for layer in graph.layers:
        trained = any(p not in graph.frozen for p in layer.parameters)
        if any(spec.is_float for spec in layer.outputs) and (trained or learns.intersection(layer.inputs)):
            learns.add(layer.name)
    return learns


def _matters(graph: Graph, wanted: Collection[str], alive: Collection[str]) -> set[str]:
    """Return the values from which a gradient can come back: floating-point ones, on a way to a target."""
    matters: set[str] = set()
    for layer in reversed(graph.layers):
        if layer.name in alive and any(spec.is_float for spec in layer.outputs):
            readers = graph.readers[layer.name]
            if layer.name in wanted or matters.intersection(readers):
                matters.add(layer.name)
    return matters
