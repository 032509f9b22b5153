"""Every plan worth asking about: replicas x stages x ways to split them, schedules, micro-batches.

A replica has `count` stages that are split alike, then `singles` stages of one rank each (Hy-Fi's tiled-first
arrangement, `2x2|1|1`, or with several tiled ones, `2x2|2x2|1`). With one stage all schedules run the same
program, so only one of them is listed. Counts that do not divide the ranks leave some of them idle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.plan import Plan, Split, Way

SCHEDULES = ("layer", "gpipe", "1f1b", "zero-bubble", "gems-mast", "gems-master", "bidirectional")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
REPLICATIONS = (2, 4)
HALOS = ("layer", "fused")
_FEW = 32
# How many tiled stages there are in front of single-rank ones where there are many ranks: with more of them
# deep networks would have to be cut in so many ways that a search of thousands of ranks takes a minute.
_FRONTS = (1,)


@dataclass(frozen=True, slots=True)
class Timing:
    """When the stages of a plan work."""

    schedule: str
    micro_batches: int
    replication: int

    @property
    def rounds(self) -> int:
        """Return how often the direction changes."""
        return {"gems-mast": 2, "gems-master": 2 * self.replication}.get(self.schedule, 1)

    @property
    def parts(self) -> int:
        """Return into how many micro-batches a replica's share is cut."""
        return self.micro_batches * self.rounds


@dataclass(frozen=True, slots=True)
class Shape:
    """How a replica is built: stages that are split alike, single-rank ones behind them; and the replicas."""

    count: int
    singles: int
    data: int

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return self.count + self.singles


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan in a few numbers; `plan()` writes it out."""

    data: int
    split: Split
    count: int
    singles: int
    schedule: str
    micro_batches: int
    replication: int
    halo: str

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return self.count + self.singles

    @property
    def ranks(self) -> int:
        """Return the number of ranks that work."""
        return self.data * (self.count * self.split.width + self.singles)

    @property
    def parts(self) -> int:
        """Return into how many micro-batches a replica's share is cut."""
        return Timing(self.schedule, self.micro_batches, self.replication).parts

    def plan(self) -> Plan:
        """Return the plan."""
        return Plan(
            self.data,
            (self.split,) * self.count + (Split(),) * self.singles,
            self.schedule,
            self.micro_batches,
            self.halo,
            replication=self.replication,
        )

    def __str__(self) -> str:
        return str(self.plan())


def candidates(ranks: int, dims: int, *, exact: bool = False) -> Iterator[Candidate]:
    """Yield every plan for at most so many ranks.

    Args:
        ranks: how many there are.
        dims: spatial dimensions of the images; 0 if they have none.
        exact: only plans without idle ranks.
    """
    for split in splits(ranks, dims):
        for shape in shapes(ranks, split, exact):
            for timing in timings(shape.stages):
                for halo in halos_of(split):
                    yield candidate(split, halo, shape, timing)


def candidate(split: Split, halo: str, shape: Shape, timing: Timing) -> Candidate:
    """Put a plan together."""
    return Candidate(
        shape.data,
        split,
        shape.count,
        shape.singles,
        timing.schedule,
        timing.micro_batches,
        timing.replication,
        halo,
    )


def halos_of(split: Split) -> tuple[str, ...]:
    """Return how borders may be exchanged; only tiles have some."""
    return HALOS if split.way is Way.SPATIAL else HALOS[:1]


def sizes(ranks: int) -> list[int]:
    """Return the numbers of stages and parts to try: all of a few, else divisors and powers of two."""
    if ranks <= _FEW:
        return list(range(1, ranks + 1))
    return sorted({d for d in range(1, ranks + 1) if ranks % d == 0 or d & (d - 1) == 0})


def splits(ranks: int, dims: int) -> Iterator[Split]:
    """Yield every way to share out a stage: not at all, by tiles of any grid, by filters, channels, pairs."""
    yield Split()
    for width in sizes(ranks)[1:]:
        if dims:
            for grid in _grids(width, dims):
                yield Split(Way.SPATIAL, grid)
        for way in (Way.FILTER, Way.CHANNEL, Way.PAIRS):
            yield Split(way, (width,))


def _grids(width: int, dims: int) -> Iterator[tuple[int, ...]]:
    divisors = [d for d in range(1, width + 1) if width % d == 0]
    for grid in itertools.product(divisors, repeat=dims - 1):
        rest, left = divmod(width, math.prod(grid))
        if not left:
            yield (*grid, rest)


def shapes(ranks: int, split: Split, exact: bool = False) -> Iterator[Shape]:
    """Yield every arrangement of stages and replicas: all stages alike, or only the first ones tiled."""
    arrangements = [(count, 0) for count in sizes(ranks) if count * split.width <= ranks]
    if split.way is Way.SPATIAL:
        for count in _FRONTS if ranks > _FEW else sizes(ranks):
            front = count * split.width
            arrangements += [(count, singles) for singles in sizes(ranks) if front + singles <= ranks]
    for count, singles in arrangements:
        for data in replicas(ranks, count * split.width + singles, exact):
            yield Shape(count, singles, data)


def replicas(ranks: int, size: int, exact: bool) -> list[int]:
    """Return the numbers of replicas to try: every one for a few ranks, else as many as fit."""
    most = ranks // size
    if exact:
        return [most] if most * size == ranks else []
    return list(range(1, most + 1)) if ranks <= _FEW else [most]


def timings(stages: int) -> tuple[Timing, ...]:
    """Return every schedule with its micro-batches; with one stage all schedules are the same."""
    return _ONE if stages == 1 else _MANY


def _many() -> Iterator[Timing]:
    for micro in MICRO_BATCHES:
        for schedule in SCHEDULES:
            # With one micro-batch gpipe and 1f1b are the program of `layer`.
            if (schedule == "layer") != (micro == 1) and schedule in ("layer", "gpipe", "1f1b"):
                continue
            if schedule == "bidirectional" and micro % 2:
                continue
            for replication in REPLICATIONS if schedule == "gems-master" else (1,):
                yield Timing(schedule, micro, replication)


_MANY = tuple(_many())
_ONE = tuple(Timing("1f1b", micro, 1) for micro in MICRO_BATCHES)
