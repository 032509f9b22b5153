"""List scheduling: run a clock and start, wherever ranks are free, the work that is ready.

Used where no closed form is at hand: two directions that share ranks, stages of different width, backward
passes in two parts. Because all ranks' orders come from one clock, no order can wait for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.plan import Direction
from shardwise.program.actions import Act, Action

FOREVER = 1 << 60
SECONDS = {Act.FORWARD: 1, Act.BACKWARD: 2, Act.BACKWARD_WEIGHT: 1}


@dataclass
class Lane:
    """One stage in one direction: its ranks, its micro-batches, and how far it has come.

    `alive` bounds the micro-batches between forward and backward, `kept` those whose weights' part of
    the backward is still to come.
    """

    stage: int
    direction: Direction
    positions: tuple[int, ...]
    micro_batches: Sequence[int]
    alive: int
    kept: int = FOREVER
    ends: dict[Act, list[int]] = field(default_factory=lambda: {act: [] for act in SECONDS})

    def started(self, act: Act) -> int:
        """Return how many micro-batches have started this computation."""
        return len(self.ends[act])

    def ended(self, act: Act, index: int, now: int) -> bool:
        """Tell whether the computation of the micro-batch with this index is over."""
        ends = self.ends[act]
        return index < len(ends) and ends[index] <= now


@dataclass(frozen=True)
class Listing:
    """The outcome: the orders of all positions, and when the last of them ends."""

    orders: list[list[Action]]
    makespan: int


def list_schedule(
    lanes: Sequence[Lane], positions: int, priorities: Sequence[Act], seconds: dict[Act, int] | None = None
) -> Listing:
    """Order the work of all lanes; of what is ready start the earliest of `priorities` first.

    Args:
        lanes: every direction's stages in rising order, the directions one after another.
        positions: how many ranks a replica has.
        priorities: what goes first; without BACKWARD_WEIGHT a backward is one piece.
        seconds: how long each computation takes.
    """
    costs = seconds or SECONDS
    free = [0] * positions
    orders: list[list[Action]] = [[] for _ in range(positions)]
    left = len(priorities) * sum(len(lane.micro_batches) for lane in lanes)
    now = 0
    while left:
        ready = [choice for i in range(len(lanes)) for choice in _ready(lanes, i, priorities, now)]
        for _, index, lane, act in sorted(ready, key=lambda choice: choice[:2]):
            if any(free[p] > now for p in lane.positions):
                continue
            # Another act of the same lane may have started at this very moment on ranks that are all busy
            # now, so what is ready here is still the next of its kind.
            end = now + costs[act]
            lane.ends[act].append(end)
            action = Action(act, lane.stage, lane.micro_batches[index], lane.direction)
            for position in lane.positions:
                free[position] = end
                orders[position].append(action)
            left -= 1
        now = min((t for t in free if t > now), default=now)
    return Listing(orders, max(free))


def _ready(
    lanes: Sequence[Lane], i: int, priorities: Sequence[Act], now: int
) -> Iterator[tuple[tuple[int, int], int, Lane, Act]]:
    """Yield what a lane could start now, as (rank in the order of priorities, index, lane, act)."""
    lane = lanes[i]
    forwards, backwards = lane.started(Act.FORWARD), lane.started(Act.BACKWARD)
    weights = lane.started(Act.BACKWARD_WEIGHT)
    first = lane.stage == 0
    last = i + 1 == len(lanes) or lanes[i + 1].stage == 0
    for turn, act in enumerate(priorities):
        index = lane.started(act)
        if index == len(lane.micro_batches):
            continue
        if act is Act.FORWARD:
            allowed = forwards - backwards < lane.alive and forwards - weights < lane.kept
            ready = allowed and (first or lanes[i - 1].ended(act, index, now))
        elif act is Act.BACKWARD:
            ready = lane.ended(Act.FORWARD, index, now)
            ready = ready and (last or lanes[i + 1].ended(act, index, now))
        else:
            ready = lane.ended(Act.BACKWARD, index, now)
        if ready:
            yield (turn, lane.micro_batches[index]), index, lane, act
