"""GEMS-MAST and GEMS-MASTER: rounds that flow down and up in turn, one round alive at a time.

S = 3, two rounds (MAST); each rank hosts stage s of the round that goes down and S-1-s of the one up:

    rank 0   F0              B0 F2↑ B2↑                 (stages 0 and 2)
    rank 1       F1       B1 F1↑       B1↑              (stage 1 twice)
    rank 2           F2 B2 F0↑            B0↑           (stages 2 and 0)

The last rank ends its backward first and hosts stage 0 of the next round, so the next forward fills the
drain of the backward before it. MASTER has 2 x replication rounds. With micro-batches every round is a
GPipe of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.plan import Mesh, Plan, direction_of, micro_batches_of
from shardwise.program.actions import Act, Action


def gems(plan: Plan, mesh: Mesh) -> list[list[Action]]:
    """Alternate rounds down and up, each forward then backward."""
    lists: dict[tuple[int, ...], list[Action]] = {}
    result = []
    for position in range(mesh.positions):
        stages = tuple(role.stage for role in mesh.roles(position))
        if stages not in lists:
            lists[stages] = list(_rounds(plan, *stages))
        result.append(lists[stages])
    return result


def _rounds(plan: Plan, down: int, up: int) -> Iterator[Action]:
    size = plan.micro_batches
    for first in range(0, micro_batches_of(plan), size):
        direction = direction_of(plan, first)
        stage = down if direction is direction_of(plan, 0) else up
        for act in (Act.FORWARD, Act.BACKWARD):
            for micro_batch in range(first, first + size):
                yield Action(act, stage, micro_batch, direction)
