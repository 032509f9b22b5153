"""Zero-bubble pipelining in the memory of 1F1B (the H1 variant): backward in two parts.

Only the input's part of a backward is waited for by another stage; the weights' part fills what would be
a bubble. With F = B = W the bubble shrinks from 3 (S-1) to S-1. At most S - s micro-batches are alive
between forward and backward in stage s, and at most S wait for their weights' part.
"""

from __future__ import annotations

from shardwise.plan import Direction, Mesh, Plan, micro_batches_of
from shardwise.program.actions import Act, Action
from shardwise.program.schedules.greedy import Lane, list_schedule

_RULE = (Act.BACKWARD, Act.FORWARD, Act.BACKWARD_WEIGHT)
_EQUAL = dict.fromkeys(_RULE, 1)


def zero_bubble(plan: Plan, mesh: Mesh) -> list[list[Action]]:
    """Run 1F1B on the inputs' parts and fill its gaps with the weights' parts."""
    own = range(micro_batches_of(plan))
    stages = mesh.stages
    lanes = [
        Lane(s, Direction.DOWN, mesh.member_positions(s), own, alive=stages - s, kept=stages)
        for s in range(stages)
    ]
    return list_schedule(lanes, mesh.positions, _RULE, _EQUAL).orders
