"""Check a plan against the network, the ranks and the mini-batch that it is meant for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardwise.graph import Graph, Kind, Layer
from shardwise.machine import Machine
from shardwise.plan.cutting import choose_cuts
from shardwise.plan.errors import PlanError
from shardwise.plan.micro_batches import is_bidirectional, micro_batches_of
from shardwise.plan.plan import Plan
from shardwise.plan.split import Split, Way
from shardwise.plan.stages import shared_parameters, stage_edges, stage_layers

_WEIGHTED = (Kind.CONVOLUTION, Kind.TRANSPOSED, Kind.LINEAR)


def check(
    plan: Plan,
    graph: Graph | None,
    ranks: int | None = None,
    batch: int | None = None,
    machine: Machine | None = None,
) -> list[str]:
    """Return notes on what is allowed but worth knowing.

    Args:
        plan: how training is to be split.
        graph: the network, or None to check only what does not depend on it.
        ranks: how many ranks there are.
        batch: the samples of a mini-batch.
        machine: where it is to run; its accelerators, where nodes are counted, are the most ranks.

    Raises:
        PlanError: with the field, the reason and the nearest plan that works, if the plan cannot be used.
    """
    _check_schedule(plan)
    if ranks is not None and plan.ranks != ranks:
        found = f"the plan needs {plan.ranks} ranks ({_sum(plan)}), there are {ranks}"
        raise PlanError("ranks", found, f"nearest plan that works: {nearest(plan, ranks)}")
    if machine is not None:
        _check_machine(plan, machine)
    notes = list(_schedule_notes(plan))
    if batch is not None:
        notes += _batch_notes(plan, batch)
    if graph is not None:
        notes += _graph_notes(plan, graph)
    return notes


def nearest(plan: Plan, ranks: int) -> Plan:
    """Return a plan for so many ranks that differs as little as possible.

    Other numbers of replicas are tried first, then other numbers of equal stages, then fewer of the given
    stages; the rest is data parallelism.
    """
    width = plan.ranks // plan.data
    if ranks % width == 0:
        return plan.replace(data=ranks // width)
    first = plan.stages[0]
    if all(split == first for split in plan.stages):
        for data in sorted(_divisors(ranks), key=lambda d: (abs(d - plan.data), d)):
            if ranks // data % first.width == 0:
                stages = (first,) * (ranks // data // first.width)
                return plan.replace(data=data, stages=stages, cuts=())
    for count in range(len(plan.stages) - 1, 0, -1):
        width = sum(split.width for split in plan.stages[:count])
        if ranks % width == 0:
            return plan.replace(data=ranks // width, stages=plan.stages[:count], cuts=())
    return plan.replace(data=ranks, stages=(Split(),), cuts=())


def _check_machine(plan: Plan, machine: Machine) -> None:
    most = machine.nodes * machine.node.devices
    # More ranks than cores share them; two ranks on one accelerator are no plan.
    if not machine.nodes or machine.device.host or plan.ranks <= most:
        return
    found = (
        f"the plan needs {plan.ranks} ranks ({_sum(plan)}), {machine.name} has {most} "
        f"({machine.nodes} nodes of {machine.node.devices})"
    )
    width = plan.ranks // plan.data
    fitting = plan.replace(data=most // width) if width <= most else nearest(plan, most)
    raise PlanError("ranks", found, f"nearest plan that works: {fitting}")


def _check_schedule(plan: Plan) -> None:
    micro_batches_of(plan)
    if plan.replication > 1 and plan.schedule != "gems-master":
        found = f"{plan.replication} found, which only schedule=gems-master has"
        raise PlanError("replication", found, f"nearest plan that works: {plan.replace(replication=1)}")


def _schedule_notes(plan: Plan) -> Iterator[str]:
    stages, parts = len(plan.stages), micro_batches_of(plan)
    if stages == 1 and is_bidirectional(plan.schedule):
        yield f"schedule={plan.schedule}: with one stage the two directions have nothing to overlap"
    if stages > 1 and parts < stages and plan.schedule in ("gpipe", "1f1b", "zero-bubble", "bidirectional"):
        yield f"micro_batches={parts}: fewer than the {stages} stages, so some of them are always idle"


def _batch_notes(plan: Plan, batch: int) -> Iterator[str]:
    if batch < 1:
        raise PlanError("batch", f"{batch} samples found", "a mini-batch has at least 1")
    shares = plan.data * micro_batches_of(plan)
    if batch < shares:
        yield (
            f"batch={batch}: fewer samples than the {shares} shares (replicas x micro-batches), "
            f"so {shares - batch} of them are empty"
        )
    elif batch % shares:
        yield f"batch={batch}: no multiple of {shares} shares (replicas x micro-batches), which differ by one"
    largest = -(-batch // shares)
    for stage, split in enumerate(plan.stages):
        if split.way is Way.BATCH and split.width > largest:
            yield f"stages: stage {stage} has at most {largest} samples for {split.width} ranks, some idle"


def _graph_notes(plan: Plan, graph: Graph) -> Iterator[str]:
    layers = sum(layer.kind is not Kind.INPUT for layer in graph)
    if len(plan.stages) > layers:
        fewer = plan.replace(stages=plan.stages[:layers], cuts=())
        found = f"{len(plan.stages)} stages for a network of {layers} layers"
        raise PlanError("stages", found, f"nearest plan that works: {fewer}")
    cuts = choose_cuts(graph, plan)
    _check_splits(plan, graph, cuts)
    for name, stages in shared_parameters(graph, cuts).items():
        yield f"{name}: shared by stages {', '.join(map(str, stages))}, so its gradients are summed over them"
    norms = [layer.name for layer in graph if layer.attributes.get("batch_statistics")]
    if norms and micro_batches_of(plan) > 1 and plan.batch_norm != "deferred":
        yield f"batch norm ({norms[0]} and {len(norms) - 1} more): statistics are those of each micro-batch"


def _check_splits(plan: Plan, graph: Graph, cuts: tuple[int, ...]) -> None:
    """Check that every stage can be split its way at all."""
    entering = [set[str]() for _ in plan.stages]
    images = max((len(layer.shape) - 2 for layer in graph.inputs), default=0)
    for edge in stage_edges(graph, cuts):
        entering[edge.target].add(edge.value)
    for stage, (split, layers) in enumerate(zip(plan.stages, stage_layers(graph, cuts), strict=True)):
        names = {name for layer in layers for name in layer.inputs if graph[name].kind is Kind.INPUT}
        ranks = [len(graph[name].outputs[0].shape) - 2 for name in sorted(names | entering[stage])]
        if split.way is Way.SPATIAL and len(split.fitted(images).grid) not in ranks:
            dims = max(ranks, default=0)
            found = (
                f"stage {stage} has a grid of {len(split.grid)} dimensions ({split}), "
                f"but what enters it has {max(dims, 0)} spatial dimensions"
            )
            raise PlanError("stages", found, _remedy(plan, stage, _refold(split, dims)))
        if split.way in (Way.FILTER, Way.CHANNEL, Way.PAIRS):
            most = max(
                (_features(layer, split.way) for layer in layers if layer.kind in _WEIGHTED), default=0
            )
            if most < split.width:
                found = f"no layer of stage {stage} has the {split.width} channels that {split} needs"
                smaller = Split(split.way, (most,)) if most > 1 else Split()
                raise PlanError("stages", found, _remedy(plan, stage, smaller))


def _features(layer: Layer, way: Way) -> int:
    """Return how many channels of a layer could be shared out."""
    shape = layer.operands[0].spec.shape if way is Way.CHANNEL else layer.shape
    return shape[-1] if layer.kind is Kind.LINEAR else shape[1]


def _refold(split: Split, dims: int) -> Split:
    """Fit a grid to images of so many dimensions, keeping its number of tiles."""
    if dims < 1:
        return Split()
    grid = split.grid + (1,) * (dims - len(split.grid))
    return Split(Way.SPATIAL, (*grid[: dims - 1], math.prod(grid[dims - 1 :])))


def _remedy(plan: Plan, stage: int, split: Split) -> str:
    same = tuple(split if other == plan.stages[stage] else other for other in plan.stages)
    return f"nearest plan that works: {plan.replace(stages=same)}"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _sum(plan: Plan) -> str:
    inside = " + ".join(str(split.width) for split in plan.stages)
    return f"{plan.data} x ({inside})" if plan.data > 1 or len(plan.stages) > 1 else inside
