"""Simulate a schedule over whole passes, in the order of the program: one rank for each stage's group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from shardwise.oracle.search.passes import Floats, Stages
from shardwise.oracle.search.space import Timing
from shardwise.plan import Plan, Split
from shardwise.plan.mesh import mesh_of
from shardwise.program.actions import Act
from shardwise.program.schedules import orders

# (what, stage, micro-batch)
Pass = tuple[Act, int, int]


@lru_cache(maxsize=32)
def order_of(stages: int, timing: Timing) -> tuple[tuple[Pass, ...], ...]:
    """Return what the rank of every position computes, in order."""
    plan = Plan(1, (Split(),) * stages, timing.schedule, timing.micro_batches, replication=timing.replication)
    lists = orders(plan, mesh_of(plan))
    return tuple(tuple((a.act, a.stage, a.micro_batch) for a in actions) for actions in lists)


def run(lists: Sequence[Sequence[Pass]], stages: Stages) -> Floats:
    """Return when every position is done."""
    last = len(stages.forward) - 1
    splits = any(act is Act.BACKWARD_WEIGHT for act, _, _ in lists[0])
    ahead, message = stages.forward.tolist(), stages.message.tolist()
    weight = stages.weight.tolist()
    back = (stages.backward - stages.weight if splits else stages.backward).tolist()
    position, clock = [0] * len(lists), [0.0] * len(lists)
    done: dict[Pass, float] = {}
    blocked: dict[Pass, list[int]] = {}
    runnable = list(range(len(lists)))
    while runnable:
        rank = runnable.pop()
        mine, now, i = lists[rank], clock[rank], position[rank]
        while i < len(mine):
            action = mine[i]
            act, stage, micro = action
            source: Pass | None = None
            flight, seconds = 0.0, weight[stage]
            if act is Act.FORWARD:
                seconds = ahead[stage]
                if stage:
                    source, flight = (act, stage - 1, micro), message[stage - 1]
            elif act is Act.BACKWARD:
                seconds = back[stage]
                if stage < last:
                    source, flight = (act, stage + 1, micro), message[stage]
            if source is not None:
                sent = done.get(source)
                if sent is None:
                    blocked.setdefault(source, []).append(rank)
                    break
                now = max(now, sent + flight)
            now += seconds
            done[action] = now
            i += 1
            if action in blocked:
                runnable += blocked.pop(action)
        clock[rank], position[rank] = now, i
    return np.array(clock)
