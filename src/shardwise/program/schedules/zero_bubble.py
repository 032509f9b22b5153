"""Zero-bubble pipelining in the memory of 1F1B (the H1 variant): backward in two parts.

Only the input's part B of a backward is waited for by another stage. The weights' part W follows s
backwards later in stage s: the later the stage, the fewer forwards it starts with and the more W it can
put off, so that they fill its drain. S = 3, M = 4:

    stage 0   F0 F1 F2 .. .. B0 W0 F3 B1 W1 B2 W2 B3 W3
    stage 1   .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    stage 2   .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

With F = B = W and M >= S the bubble is S - 1 instead of 3 (S - 1). At most S - s micro-batches are alive
between F and B in stage s, and at most S between F and W.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.plan import Mesh, Plan, micro_batches_of
from shardwise.program.actions import Act, Action


def zero_bubble(plan: Plan, mesh: Mesh) -> list[list[Action]]:
    """Run 1F1B on the inputs' parts, and put the weights' parts off by s backwards in stage s."""
    count = micro_batches_of(plan)
    lists = [list(_delayed(s, count, mesh.stages - s)) for s in range(mesh.stages)]
    return [lists[mesh.roles(position)[0].stage] for position in range(mesh.positions)]


def _delayed(stage: int, count: int, alive: int) -> Iterator[Action]:
    for m in range(min(count, alive)):
        yield Action(Act.FORWARD, stage, m)
    for m in range(count):
        yield Action(Act.BACKWARD, stage, m)
        if m >= stage:
            yield Action(Act.BACKWARD_WEIGHT, stage, m - stage)
        if m + alive < count:
            yield Action(Act.FORWARD, stage, m + alive)
    for m in range(max(0, count - stage), count):
        yield Action(Act.BACKWARD_WEIGHT, stage, m)
