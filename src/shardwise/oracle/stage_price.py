"""What a lowered stage takes: the events of every rank, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.oracle.events import Event
from shardwise.oracle.segments import Done, Events, Segment
from shardwise.program import Op


@dataclass
class StagePrice:
    """The priced operations of a stage, for each rank of the group, in execution order.

    `done[r]` has the events of each of the `ops`, `forward[r]` and `backward[r]` are those of all of them for
    one micro-batch; keys of meetings are positions in the program and become unique when a schedule puts
    several of them in a row. `variance` is the summed squared spread of one rank's kernels.
    `ahead[r]` and `segments[r]` are the same passes with computations between communications in one piece.
    `busy[r]`, `alone[r]` and `crowded[r]` are the seconds of all computations and copies on a busy node, on
    one whose other cores are idle, and those on a core of one where more ranks than cores work.
    """

    width: int
    ranks: tuple[int, ...]
    ops: tuple[Op, ...] = ()
    done: list[tuple[Done, ...]] = field(default_factory=list)
    ahead: list[list[Event]] = field(default_factory=list)
    segments: list[list[Segment]] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    crowded: list[float] = field(default_factory=list)
    variance: float = 0.0
    flags: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)

    def items(self, rank: int) -> Iterator[tuple[Op, float]]:
        """Yield each operation of a rank with its seconds, forward and backward together."""
        for op, done in zip(self.ops, self.done[rank], strict=True):
            yield op, _sum(done.there) + _sum(done.back)

    @cached_property
    def forward(self) -> list[list[Event]]:
        """Return the forward events of every rank."""
        return [[event for done in mine for event in done.there] for mine in self.done]

    @cached_property
    def backward(self) -> list[list[Event]]:
        """Return the backward events of every rank."""
        return [[event for done in reversed(mine) for event in done.back] for mine in self.done]


def _sum(events: Events) -> float:
    return sum(event.seconds for event in events)
