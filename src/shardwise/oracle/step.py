"""Predict a training step of one stage on one group of ranks and its replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from shardwise.graph import Source
from shardwise.machine import Machine, Tier
from shardwise.oracle.bottleneck import explain
from shardwise.oracle.breakdown import breakdowns
from shardwise.oracle.events import Event, Kind, simulate
from shardwise.oracle.kernels import KernelTimes, Roofline
from shardwise.oracle.memory import stage_memory
from shardwise.oracle.prediction import Prediction
from shardwise.oracle.price import StagePrice, price_stage, tier_fields
from shardwise.program import Regrid, StageProgram

REDUCTION, UPDATE, INPUT = "reduction", "update", "input"
# Machines without a spread of their own still deserve an interval.
_UNKNOWN = 0.05
# Gradients travel in buckets of this size while backward still runs; the last bucket never does.
BUCKET_BYTES = 25 << 20


def predict_stage_step(
    program: StageProgram,
    machine: Machine,
    kernels: KernelTimes | None = None,
    *,
    batch: int,
    replicas: int = 1,
    micro_batches: int = 1,
    optimizer_slots: float = 1.0,
    plan: str = "",
) -> Prediction:
    """Predict forward, backward, gradient reduction and update of a plan with a single stage.

    Args:
        program: the lowered stage for one replica's micro-batch.
        machine: what it runs on.
        kernels: times of computations; default: a roofline of the machine's device.
        batch: samples of the global mini-batch.
        replicas: data-parallel copies of the group, on the ranks that follow it.
        micro_batches: how often the stage runs before an update.
        optimizer_slots: copies of the parameters that the optimizer keeps.
        plan: one line to print.
    """
    width = program.width
    groups = [range(r * width, (r + 1) * width) for r in range(replicas)]
    price = price_stage(program, machine, kernels or Roofline(machine.device), replicas=groups)
    lists = {
        rank: [
            *_input_events(program, machine, rank, price),
            *_passes(price, rank, micro_batches),
            *_reduce_and_update(program, machine, rank, replicas, price),
        ]
        for rank in range(program.width)
    }
    memory = tuple(
        stage_memory(
            program,
            rank,
            optimizer_slots=optimizer_slots,
            baseline_bytes=machine.device.baseline_bytes,
            reduced=program.width * replicas > 1,
        )
        for rank in range(program.width)
    )
    return summarise(lists, machine, price, memory, batch=batch, plan=plan, repeats=micro_batches)


def summarise(
    lists: Mapping[int, Sequence[Event]],
    machine: Machine,
    price: StagePrice,
    memory: tuple[Mapping[str, float], ...],
    *,
    batch: int,
    plan: str = "",
    repeats: int = 1,
) -> Prediction:
    """Simulate the events and put what came out into words."""
    cores = machine.node.cores if machine.device.host else 0
    spans = simulate(lists, cores=cores)
    step = max((span.end for span in spans), default=0.0)
    spread = 2 * math.sqrt(price.variance * repeats) if price.variance else _UNKNOWN * step
    fields = price.fields | {"device.memory_bytes", "device.baseline_bytes"}
    return Prediction(
        step_seconds=step,
        interval=(max(0.0, step - spread), step + spread),
        batch=batch,
        breakdown=breakdowns(spans, sorted(lists), step),
        peak_bytes_by_category=memory,
        memory_bytes=machine.device.memory_bytes,
        why=partial(explain, lists, cores, step),
        timeline=spans,
        assumed=machine.assumed(fields),
        flags=tuple(sorted(price.flags)),
        plan=plan,
        machine=machine.name,
    )


def _passes(price: StagePrice, rank: int, micro_batches: int) -> list[Event]:
    """Repeat forward and backward, with meeting keys of their own for every micro-batch."""
    both = [*price.forward[rank], *price.backward[rank]]
    if micro_batches == 1:
        return both
    return [
        event._replace(key=(micro, event.key)) if event.kind is not Kind.WORK else event
        for micro in range(micro_batches)
        for event in both
    ]


def _input_events(program: StageProgram, machine: Machine, rank: int, price: StagePrice) -> list[Event]:
    if not machine.input_bytes_per_second:
        return []
    price.fields.add("input_bytes_per_second")
    nbytes = sum(h.layout.box(rank).size * h.spec.itemsize for h in program.arrivals.values())
    rate = machine.input_bytes_per_second / min(machine.node.devices, program.width)
    return [Event(Kind.WORK, nbytes / rate, INPUT, "input")]


def parameter_bytes(program: StageProgram, rank: int) -> tuple[float, float]:
    """Return the bytes of gradients that the whole group shares, and of those that are this rank's own."""
    shared = own = 0.0
    seen: set[str] = set()
    for op in program.ops:
        if isinstance(op, Regrid):
            continue
        for operand, held in zip(op.layer.operands, op.reads, strict=True):
            if operand.origin is not Source.PARAMETER or not held.grad or operand.source in seen:
                continue
            seen.add(operand.source)
            layout = program.parameters[operand.source]
            mine = layout.box(rank)
            nbytes = mine.size * operand.spec.itemsize
            if program.width > 1 and sum(mine.meets(box) for box in layout.boxes) > 1:
                shared += nbytes
            else:
                own += nbytes
    return shared, own


def exposed(tier: Tier, seconds: float, nbytes: float) -> float:
    """Return what is left of a gradient reduction when all buckets but the last overlap with backward."""
    last = min(1.0, BUCKET_BYTES / nbytes) if nbytes else 1.0
    return seconds * (last + (1 - last) * (1 - tier.overlap))


def _reduce_and_update(
    program: StageProgram, machine: Machine, rank: int, replicas: int, price: StagePrice
) -> list[Event]:
    """Reduce shared gradients over group and replicas, own ones over replicas only; then update."""
    shared, own = parameter_bytes(program, rank)
    width = program.width
    events: list[Event] = []
    world = range(width * replicas)
    if shared and len(world) > 1:
        tier = machine.tier(world)
        price.fields |= tier_fields(tier)
        seconds = exposed(tier, tier.collective_seconds("all_reduce", len(world), shared), shared)
        peers = tuple(range(width))
        events.append(Event(Kind.MEET, seconds, REDUCTION, "shared gradients", ("reduce", 0), peers))
    if own and replicas > 1:
        tier = machine.tier((rank, rank + width * (replicas - 1)))
        price.fields |= tier_fields(tier)
        # All ranks of a node reduce at once, each with its own replicas.
        flows = min(width, machine.node.devices)
        seconds = exposed(tier, tier.collective_seconds("all_reduce", replicas, own, flows), own)
        events.append(Event(Kind.WORK, seconds, REDUCTION, "own gradients"))
    rate = machine.device.update_bytes_per_second or machine.device.memory_bandwidth / 6
    price.fields.add("device.update_bytes_per_second")
    events.append(Event(Kind.WORK, (shared + own) / rate, UPDATE, "optimizer"))
    return events
