"""Price what a step does around its actions: counting targets before, folding statistics behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.machine import Machine
from shardwise.oracle.events import Event, Kind
from shardwise.plan import Mesh
from shardwise.plan.stages import stage_layers
from shardwise.program import Regrid, StageProgram
from shardwise.program.losses import is_counted
from shardwise.program.lowered import Lowered

STATISTICS = "statistics"
# Calls of torch for each share of the targets, and for each batch norm and micro-batch that is folded.
_COUNTING, _FOLDING = 3, 6


def counting(
    lowered: Lowered, mesh: Mesh, machine: Machine, rank: int, world: Sequence[int]
) -> Iterator[Event]:
    """Yield the sum of the targets that count, over all shares of the mini-batch, where the loss needs it.

    Args:
        lowered: the step.
        mesh: where its stages are.
        machine: for the times of sums.
        rank: whose events these are.
        world: the ranks that are simulated.
    """
    shares = mesh.data * lowered.program.micro_batches
    if shares < 2 or not lowered.program.training:
        return
    for stage, layers in enumerate(stage_layers(lowered.graph, lowered.cuts)):
        group = mesh.reduction_group(stage)
        if rank not in group or not any(map(is_counted, layers)):
            continue
        work = _COUNTING * lowered.program.micro_batches * machine.device.overhead_forward_seconds
        yield Event(Kind.WORK, work, STATISTICS, "counting targets")
        yield _meeting(machine, group, world, 8.0, ("count", stage), "counting targets")


def folding(
    lowered: Lowered,
    mesh: Mesh,
    machine: Machine,
    rank: int,
    world: Sequence[int],
    programs: Sequence[StageProgram],
) -> Iterator[Event]:
    """Yield the exchange of batch-norm statistics between all that hold a layer, where none sees all."""
    program, meaning = lowered.program, lowered.plan.batch_norm
    folds = program.bidirectional or meaning == "deferred" or (meaning == "local" and mesh.size > 1)
    if not folds or not program.training:
        return
    for stage, held in enumerate(programs):
        group = mesh.reduction_group(stage)
        channels = _tracked(held)
        if rank not in group or not channels:
            continue
        nbytes = 8.0 * program.micro_batches * sum(channels)
        yield _meeting(machine, group, world, nbytes, ("fold", stage), "folding statistics")
        calls = _FOLDING * program.micro_batches * len(channels)
        work = calls * machine.device.overhead_forward_seconds
        yield Event(Kind.WORK, work, STATISTICS, "folding statistics")


def _tracked(program: StageProgram) -> list[int]:
    """Return the channels of every batch norm that keeps running statistics."""
    found: dict[str, int] = {}
    for op in program.ops:
        if isinstance(op, Regrid) or not op.layer.attributes.get("batch_statistics"):
            continue
        for operand in op.layer.operands:
            if operand.role == "running_mean":
                found[operand.source] = op.layer.shape[1]
    return list(found.values())


def _meeting(
    machine: Machine, group: Sequence[int], world: Sequence[int], nbytes: float, key: object, label: str
) -> Event:
    seconds = machine.sum_seconds(machine.tier(group), len(group), nbytes)
    peers = tuple(rank for rank in group if rank in world)
    return Event(Kind.MEET, seconds, STATISTICS, label, key, peers)
