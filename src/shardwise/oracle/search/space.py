"""Every plan worth asking about: replicas x stages x ways to split them, schedules, micro-batches.

A replica has `count` stages that are split alike, then `singles` stages of one rank each (Hy-Fi's tiled-first
arrangement, `2x2|1|1`). With one stage all schedules run the same program, so only one of them is listed.
Counts that do not divide the ranks leave some of them idle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.plan import Plan, Split, Way

SCHEDULES = ("layer", "gpipe", "1f1b", "gems-mast", "gems-master", "bidirectional")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
REPLICATIONS = (2, 4)
HALOS = ("layer", "fused")
_FEW = 32


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
        rounds = {"gems-mast": 2, "gems-master": 2 * self.replication}
        return self.micro_batches * rounds.get(self.schedule, 1)

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
        for count, singles in shapes(ranks, split):
            size = count * split.width + singles
            for data in replicas(ranks, size, exact):
                for schedule, micro, replication in timings(count + singles):
                    for halo in halos_of(split):
                        yield Candidate(data, split, count, singles, schedule, micro, replication, halo)


def halos_of(split: Split) -> tuple[str, ...]:
    """Return how borders may be exchanged; only tiles have some."""
    return HALOS if split.way is Way.SPATIAL else HALOS[:1]


def sizes(ranks: int, factors: tuple[int, ...] = (1, 3)) -> list[int]:
    """Return the numbers of stages to try: all of a few, else divisors, 2^k and 3 x 2^k; parts only 2^k."""
    if ranks <= _FEW:
        return list(range(1, ranks + 1))
    found = {d for d in range(1, ranks + 1) if ranks % d == 0}
    for factor in factors:
        found |= {factor << k for k in range(ranks.bit_length()) if factor << k <= ranks}
    return sorted(found)


def splits(ranks: int, dims: int) -> Iterator[Split]:
    """Yield every way to share out a stage: not at all, by tiles of any grid, by filters, by channels."""
    yield Split()
    for width in sizes(ranks, (1,))[1:]:
        if dims:
            for grid in _grids(width, dims):
                yield Split(Way.SPATIAL, grid)
        yield Split(Way.FILTER, (width,))
        yield Split(Way.CHANNEL, (width,))


def _grids(width: int, dims: int) -> Iterator[tuple[int, ...]]:
    divisors = [d for d in range(1, width + 1) if width % d == 0]
    for grid in itertools.product(divisors, repeat=dims - 1):
        rest, left = divmod(width, math.prod(grid))
        if not left:
            yield (*grid, rest)


def shapes(ranks: int, split: Split) -> Iterator[tuple[int, int]]:
    """Yield (stages split alike, single-rank stages behind them)."""
    for count in sizes(ranks):
        if count * split.width <= ranks:
            yield count, 0
    if split.way is Way.SPATIAL:
        for singles in sizes(ranks):
            if split.width + singles <= ranks:
                yield 1, singles


def replicas(ranks: int, size: int, exact: bool) -> list[int]:
    """Return the numbers of replicas to try: as many as fit, and every count that divides those."""
    most = ranks // size
    if exact:
        return [most] if most * size == ranks else []
    return [most] if ranks > _FEW else list(range(1, most + 1))


def timings(stages: int) -> Iterator[tuple[str, int, int]]:
    """Yield (schedule, micro-batches, replication)."""
    for micro in MICRO_BATCHES:
        if stages == 1:
            yield "1f1b", micro, 1
            continue
        for schedule in SCHEDULES:
            # With one micro-batch gpipe and 1f1b are the program of `layer`.
            if (schedule == "layer") != (micro == 1) and schedule in ("layer", "gpipe", "1f1b"):
                continue
            if schedule == "bidirectional" and micro % 2:
                continue
            for replication in REPLICATIONS if schedule == "gems-master" else (1,):
                yield schedule, micro, replication
