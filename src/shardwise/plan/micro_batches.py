"""How a mini-batch is shared out: over replicas, then over micro-batches, each with its direction.

Micro-batches are numbered within a replica, in the order of their samples. Which way they flow:

    layer, gpipe, 1f1b, zero-bubble   all down
    bidirectional                     even ones down, odd ones up
    gems-mast, gems-master            rounds of `plan.micro_batches` each (one, unless said otherwise);
                                      even rounds down, odd rounds up
"""

from __future__ import annotations

from enum import StrEnum

from shardwise.geometry import even_bounds
from shardwise.plan.errors import PlanError
from shardwise.plan.plan import Plan

BIDIRECTIONAL = ("gems-mast", "gems-master", "bidirectional")


class Direction(StrEnum):
    """Which way a micro-batch flows: from rank 0 downwards, or from the last rank upwards."""

    DOWN = "down"
    UP = "up"


def is_bidirectional(schedule: str) -> bool:
    """Tell whether a schedule sends micro-batches both ways."""
    return schedule in BIDIRECTIONAL


def micro_batches_of(plan: Plan) -> int:
    """Return into how many micro-batches a replica's share of the mini-batch is cut."""
    if plan.schedule == "layer":
        if plan.micro_batches != 1:
            raise PlanError(
                "micro_batches",
                f"{plan.micro_batches} found, schedule=layer passes the mini-batch through in one piece",
                "leave it out, or write schedule=gpipe",
            )
        return 1
    if plan.schedule == "gems-mast":
        return 2 * plan.micro_batches
    if plan.schedule == "gems-master":
        return 2 * plan.replication * plan.micro_batches
    if plan.schedule == "bidirectional" and plan.micro_batches < 2:
        raise PlanError(
            "micro_batches",
            f"{plan.micro_batches} found, schedule=bidirectional sends every other one upwards",
            "write micro_batches=2 or more, or schedule=layer",
        )
    return plan.micro_batches


def direction_of(plan: Plan, micro_batch: int) -> Direction:
    """Return which way a micro-batch flows."""
    if not is_bidirectional(plan.schedule):
        return Direction.DOWN
    turn = micro_batch if plan.schedule == "bidirectional" else micro_batch // plan.micro_batches
    return Direction.UP if turn % 2 else Direction.DOWN


def samples_of(plan: Plan, batch: int, replica: int, micro_batch: int) -> tuple[int, int]:
    """Return the first sample of a micro-batch in the global mini-batch, and the one after its last.

    Shares are as even as possible; with fewer samples than micro-batches some shares are empty.
    """
    shares = even_bounds(batch, plan.data)
    first, last = shares[replica], shares[replica + 1]
    parts = even_bounds(last - first, micro_batches_of(plan))
    return first + parts[micro_batch], first + parts[micro_batch + 1]
