"""Estimate what the ranks of a stage hold in memory, for cuts that keep within a limit.

Weights count three times, with their gradients and one number of the optimizer's each. Values that are no
views are kept for backward, as often as the schedule has micro-batches alive between the two passes:

    layer                1            gems-mast, gems-master   those of one round
    gpipe                all          1f1b, zero-bubble        S - s in stage s
                                      bidirectional            S - s, in both directions

With two directions a rank plays two stages, one from each end; each of them is given half of the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.graph import Graph
from shardwise.plan.micro_batches import is_bidirectional, micro_batches_of
from shardwise.plan.plan import Plan
from shardwise.plan.split import Way

WEIGHT_COPIES = 3
_SHARES_WEIGHTS = (Way.FILTER, Way.CHANNEL, Way.PAIRS)


@dataclass(frozen=True)
class Room:
    """The bytes of each layer that count against a limit, and how often.

    Args:
        values: of one micro-batch, shared by the ranks of a stage.
        weights: on every rank of a stage.
        alive: micro-batches that each stage holds values of.
        limit: bytes that one stage may take of a rank.
    """

    values: tuple[float, ...]
    weights: tuple[float, ...]
    alive: tuple[int, ...]
    limit: float


def room_of(graph: Graph, plan: Plan, places: list[int], limit: float) -> Room:
    """Estimate the memory of the layers at some places of a network of one mini-batch."""
    batch = max(1, graph.batch)
    part = -(-batch // (plan.data * micro_batches_of(plan))) / batch
    layers = [graph.layers[i] for i in places]
    values = tuple(
        0.0 if layer.alias else part * sum(spec.nbytes for spec in layer.outputs) for layer in layers
    )
    # Stages that do not share their weights out hold them whole, and any layer may become one of theirs.
    parts = min(split.width if split.way in _SHARES_WEIGHTS else 1 for split in plan.stages)
    weights = tuple(WEIGHT_COPIES * layer.parameter_bytes / parts for layer in layers)
    both = is_bidirectional(plan.schedule)
    return Room(values, weights, alive_of(plan), limit / 2 if both else limit)


def alive_of(plan: Plan) -> tuple[int, ...]:
    """Return how many micro-batches each stage holds values of at once."""
    stages, parts = len(plan.stages), micro_batches_of(plan)
    if plan.schedule in ("gems-mast", "gems-master"):
        return (plan.micro_batches,) * stages
    if plan.schedule in ("layer", "gpipe"):
        return (parts,) * stages
    if plan.schedule == "bidirectional":
        parts = -(-parts // 2)
    return tuple(min(parts, stages - s) for s in range(stages))
