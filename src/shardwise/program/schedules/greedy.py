"""List scheduling: run a clock and start, wherever ranks are free, the work that is ready.

Used where no closed form is at hand: two directions that share ranks, with stages of different width.
Because all ranks' orders come from one clock, no order can wait for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.plan import Direction
from shardwise.program.actions import Act, Action

TICKS = {Act.FORWARD: 1, Act.BACKWARD: 2}


@dataclass
class Lane:
    """One stage in one direction: its ranks, its micro-batches, and how far it has come.

    `alive` bounds the micro-batches between forward and backward; `ends` has the ends of all computations
    that were started.
    """

    stage: int
    direction: Direction
    positions: tuple[int, ...]
    micro_batches: Sequence[int]
    alive: int
    ends: dict[Act, list[int]] = field(default_factory=lambda: {act: [] for act in TICKS})

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


def list_schedule(lanes: Sequence[Lane], positions: int, first: Act) -> Listing:
    """Order the work of all lanes; of what is ready `first` goes first, then the lower micro-batch.

    Args:
        lanes: every direction's stages in rising order, the directions one after another.
        positions: how many ranks a replica has.
        first: whether forwards or backwards go first.
    """
    free = [0] * positions
    orders: list[list[Action]] = [[] for _ in range(positions)]
    touches = _touched(lanes)
    # When something ends, only the lanes that it touches can have become ready.
    awake: dict[int, set[int]] = {0: set(range(len(lanes)))}
    while awake:
        now = min(awake)
        ready = [(i, act) for i in sorted(awake.pop(now)) for act in _ready(lanes, i, now)]
        ready.sort(key=lambda choice: (choice[1] is not first, _next(lanes[choice[0]], choice[1])))
        for i, act in ready:
            lane = lanes[i]
            # If the lane's other computation has just started its ranks are busy now.
            if any(free[p] > now for p in lane.positions):
                continue
            action, end = Action(act, lane.stage, _next(lane, act), lane.direction), now + TICKS[act]
            lane.ends[act].append(end)
            for position in lane.positions:
                free[position] = end
                orders[position].append(action)
            awake.setdefault(end, set()).update(touches[i])
    return Listing(orders, max(free))


def _touched(lanes: Sequence[Lane]) -> list[set[int]]:
    """Return for every lane those that may wait for it: its neighbours, and all that share its ranks."""
    sharing: dict[int, list[int]] = {}
    for i, lane in enumerate(lanes):
        for position in lane.positions:
            sharing.setdefault(position, []).append(i)
    return [
        {j for j in (i - 1, i + 1) if 0 <= j < len(lanes)}.union(*(sharing[p] for p in lane.positions))
        for i, lane in enumerate(lanes)
    ]


def _next(lane: Lane, act: Act) -> int:
    return lane.micro_batches[lane.started(act)]


def _ready(lanes: Sequence[Lane], i: int, now: int) -> Iterator[Act]:
    """Yield what a lane could start now."""
    lane = lanes[i]
    forwards, backwards = lane.started(Act.FORWARD), lane.started(Act.BACKWARD)
    if (
        forwards < len(lane.micro_batches)
        and forwards - backwards < lane.alive
        and (lane.stage == 0 or lanes[i - 1].ended(Act.FORWARD, forwards, now))
    ):
        yield Act.FORWARD
    if backwards < len(lane.micro_batches) and lane.ended(Act.FORWARD, backwards, now):
        last = i + 1 == len(lanes) or lanes[i + 1].stage == 0
        if last or lanes[i + 1].ended(Act.BACKWARD, backwards, now):
            yield Act.BACKWARD
