"""One direction: GPipe and 1F1B; the plain layer-parallel scheme is GPipe with one micro-batch.

S = 3, M = 4:
                gpipe                                   1f1b
    stage 0     F0 F1 F2 F3 .. .. B0 B1 B2 B3           F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    stage 1     .. F0 F1 F2 F3 .. B0 B1 B2 B3           .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
    stage 2     .. .. F0 B0 F1 ...                      .. .. F0 B0 F1 B1 F2 B2 F3 B3

Under 1F1B at most S - s micro-batches are alive in stage s; under GPipe all of them are.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.plan import Mesh, Plan, micro_batches_of
from shardwise.program.actions import Act, Action


def gpipe(plan: Plan, mesh: Mesh) -> list[list[Action]]:
    """Run all forwards, then all backwards in the same order."""
    count = micro_batches_of(plan)
    return _by_stage(mesh, [list(_warm(s, count, count)) for s in range(mesh.stages)])


def one_forward_one_backward(plan: Plan, mesh: Mesh) -> list[list[Action]]:
    """Start the backward of a micro-batch as soon as it can be, to keep few of them alive."""
    count = micro_batches_of(plan)
    return _by_stage(mesh, [list(_warm(s, count, mesh.stages - s)) for s in range(mesh.stages)])


def _warm(stage: int, count: int, alive: int) -> Iterator[Action]:
    """Run `alive` forwards, then one backward and one forward in turn, then the other backwards."""
    for i in range(count + alive):
        if i >= alive:
            yield Action(Act.BACKWARD, stage, i - alive)
        if i < count:
            yield Action(Act.FORWARD, stage, i)


def _by_stage(mesh: Mesh, lists: list[list[Action]]) -> list[list[Action]]:
    return [lists[mesh.roles(position)[0].stage] for position in range(mesh.positions)]
