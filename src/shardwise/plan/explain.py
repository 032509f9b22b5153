"""Say in words what a plan does, and draw its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.graph import Graph
from shardwise.plan.cutting import choose_cuts, layer_cost
from shardwise.plan.mesh import Mesh, mesh_of
from shardwise.plan.micro_batches import Direction, direction_of, micro_batches_of
from shardwise.plan.plan import Plan
from shardwise.plan.split import Split, Way
from shardwise.plan.stages import shared_parameters, stage_layers

_SCHEDULES = {
    "layer": "the stages work one after another on the whole share",
    "gpipe": "all forward passes, then all backward passes",
    "1f1b": "backward passes start as early as they can, so that few micro-batches are alive",
    "gems-mast": "one round flows down, then one up through the same ranks in reverse; "
    "only one round is alive at a time",
    "gems-master": "rounds flow down and up through the same ranks in turn before one update; "
    "only one round is alive at a time",
    "bidirectional": "even micro-batches flow down, odd ones up through the same ranks in reverse",
    "zero-bubble": "as 1f1b, with the weights' part of each backward pass put off to fill the bubbles",
}
_TAILS = {
    "auto": "shared by samples where there are enough of them, else repeated on every rank",
    "batch": "shared by samples",
    "replicate": "repeated on every rank",
    "filter": "shared by filters",
}
_NORMS = {
    "sync": "statistics run over all ranks that share a micro-batch",
    "local": "statistics are each rank's own",
    "deferred": "running statistics describe the whole mini-batch",
}
_HALOS = {
    "layer": "exchanged before every layer that needs them",
    "fused": "exchanged once per chain of layers",
    "auto": "exchanged once per chain of layers that have no statistics to share",
}


def explain(plan: Plan, graph: Graph | None = None) -> str:
    """Return what the plan does, in words and as a map of ranks; with a graph also the layers of stages."""
    return "\n".join(_lines(plan, graph))


def _lines(plan: Plan, graph: Graph | None) -> Iterator[str]:
    mesh = mesh_of(plan)
    yield f"plan: {plan}"
    each = (
        ""
        if plan.data == 1
        else f", {plan.data} replicas of the network on {_count(mesh.positions, 'rank')} each"
    )
    yield f"{_count(plan.ranks, 'rank')}{each}."
    parts = micro_batches_of(plan)
    share = (
        "The mini-batch" if plan.data == 1 else f"Each replica takes 1/{plan.data} of the mini-batch, which"
    )
    verb = "passes through in one piece" if parts == 1 else f"is cut into {parts} micro-batches"
    yield f"{share} {verb}."
    if mesh.stages > 1 or mesh.bidirectional:
        yield f"Schedule {plan.schedule}: {_SCHEDULES[plan.schedule]}."
    yield from _stages(plan, graph)
    if any(split.way is Way.SPATIAL for split in plan.stages):
        halo = _HALOS.get(plan.halo, f"exchanged once for every {plan.halo} layers")
        yield f"Borders of tiles are {halo}; what follows the last tiled layer is {_TAILS[plan.tail]}."
    if plan.ranks > 1 or parts > 1:
        yield f"Batch norm: {_NORMS[plan.batch_norm]}" + (
            "; one micro-batch at a time." if parts > 1 else "."
        )
    yield from _map(plan, mesh)


def _stages(plan: Plan, graph: Graph | None) -> Iterator[str]:
    """Describe every stage, with its layers and its share of the estimated time where these are known."""
    cuts = choose_cuts(graph, plan) if graph is not None else ()
    layers = stage_layers(graph, cuts) if graph is not None else None
    total = sum(layer_cost(layer) for layer in graph) if graph is not None else 0.0
    for stage, split in enumerate(plan.stages):
        text = f"  stage {stage}: {_split(split)}"
        if layers is not None:
            mine = layers[stage]
            part = sum(layer_cost(layer) for layer in mine) / total if total else 0.0
            names = mine[0].name if len(mine) == 1 else f"{mine[0].name} ... {mine[-1].name}"
            text += f"; {_count(len(mine), 'layer')}, {names}; {part:.0%} of the estimated time"
        yield text
    if graph is not None:
        for name, users in shared_parameters(graph, cuts).items():
            yield f"  {name} is shared by stages {', '.join(map(str, users))}, which sum its gradients"


def _split(split: Split) -> str:
    size = "x".join(map(str, split.grid))
    return {
        Way.NONE: "one rank",
        Way.SPATIAL: f"{split.width} ranks, the image in {size} tiles",
        Way.FILTER: f"{split.width} ranks, each with its part of the output channels",
        Way.CHANNEL: f"{split.width} ranks, each with its part of the input channels",
        Way.PAIRS: f"{split.width} ranks, each with its part of the output channels of one layer and of the "
        "input channels of the next, in turn",
        Way.BATCH: f"{split.width} ranks, each with its part of the samples",
    }[split.way]


def _map(plan: Plan, mesh: Mesh) -> Iterator[str]:
    """Draw one row per replica and direction, one column per stage."""
    rows = [["", *(f"stage {s}" for s in range(mesh.stages))]]
    few = range(plan.data) if plan.data <= 8 else (0, 1, plan.data - 1)
    for replica in few:
        for direction in mesh.directions:
            name = f"replica {replica}" + (f" {direction}" if mesh.bidirectional else "")
            groups = (mesh.group(replica, s, direction) for s in range(mesh.stages))
            rows.append([name, *(_list(group) for group in groups)])
            if replica == 1 and len(few) < plan.data and direction is mesh.directions[-1]:
                rows.append(["..."] * (mesh.stages + 1))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    yield "Ranks:"
    for row in rows:
        yield ("  " + " │ ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
    if mesh.bidirectional:
        ups = [m for m in range(micro_batches_of(plan)) if direction_of(plan, m) is Direction.UP]
        yield f"  micro-batches going up: {_list(ups)}"


def _list(numbers: Sequence[int]) -> str:
    shown = list(map(str, numbers))
    return " ".join(shown if len(shown) <= 8 else [*shown[:3], "...", shown[-1]])


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")
