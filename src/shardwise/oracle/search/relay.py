"""Simulate a schedule over whole passes: one rank stands for each stage's group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.plan import Plan, Split
from shardwise.plan.mesh import mesh_of
from shardwise.program.actions import Act
from shardwise.program.schedules import orders

# (is it a forward, stage, micro-batch)
Pass = tuple[bool, int, int]


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of one micro-batch in every stage, and of the messages behind every stage but the last."""

    forward: Sequence[float]
    backward: Sequence[float]
    ahead: Sequence[float]
    back: Sequence[float]


@lru_cache(maxsize=512)
def order_of(
    stages: int, schedule: str, micro_batches: int, replication: int
) -> tuple[tuple[Pass, ...], ...]:
    """Return what the rank of every position computes, in order."""
    plan = Plan(1, (Split(),) * stages, schedule, micro_batches, replication=replication)
    lists = orders(plan, mesh_of(plan))
    return tuple(tuple((a.act is Act.FORWARD, a.stage, a.micro_batch) for a in actions) for actions in lists)


def run(lists: Sequence[Sequence[Pass]], stages: Stages) -> tuple[list[float], list[float]]:
    """Return when every position is done, and for how long it worked."""
    last = len(stages.forward) - 1
    position = [0] * len(lists)
    clock, busy = [0.0] * len(lists), [0.0] * len(lists)
    done: dict[Pass, float] = {}
    blocked: dict[Pass, list[int]] = {}
    runnable = list(range(len(lists)))
    while runnable:
        rank = runnable.pop()
        mine, now, i = lists[rank], clock[rank], position[rank]
        while i < len(mine):
            action = mine[i]
            ahead, stage, micro = action
            if ahead:
                seconds, source = stages.forward[stage], (True, stage - 1, micro) if stage else None
                flight = stages.ahead[stage - 1] if stage else 0.0
            else:
                seconds, source = stages.backward[stage], (False, stage + 1, micro) if stage < last else None
                flight = stages.back[stage] if stage < last else 0.0
            if source is not None:
                sent = done.get(source)
                if sent is None:
                    blocked.setdefault(source, []).append(rank)
                    break
                now = max(now, sent + flight)
            now += seconds
            busy[rank] += seconds
            done[action] = now
            i += 1
            if action in blocked:
                runnable += blocked.pop(action)
        clock[rank], position[rank] = now, i
    return clock, busy
