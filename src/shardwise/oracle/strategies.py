"""The strategies that a network's training can be split by, as families of plans for a number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from shardwise.oracle.search.space import HALOS, MICRO_BATCHES, REPLICATIONS, SCHEDULES, Candidate
from shardwise.plan import Plan, Split, Way

INSIDE = ("spatial", "filter", "channel", "pairs", *SCHEDULES)
STRATEGIES = ("data", *INSIDE, *(f"data+{inside}" for inside in INSIDE))


def strategy_of(plan: Plan) -> str:
    """Name what a plan does: `data`, `spatial`, `data+filter`, `gpipe`, `data+1f1b+spatial` ..."""
    names = ["data"] if plan.data > 1 else []
    if len(plan.stages) > 1:
        names.append(plan.schedule)
    ways = {str(split.way) for split in plan.stages if split.way is not Way.NONE}
    return "+".join([*names, *sorted(ways)]) or "serial"


def family(strategy: str, ranks: int, dims: int) -> Iterator[Candidate]:
    """Yield the plans of a strategy that use all ranks.

    Args:
        strategy: one of `STRATEGIES`.
        ranks: how many there are.
        dims: spatial dimensions of the images.
    """
    if strategy == "data":
        for micro in MICRO_BATCHES:
            yield _candidate(data=ranks, micro_batches=micro)
        return
    inside = strategy.removeprefix("data+")
    hybrid = inside != strategy
    for width in (d for d in range(2, ranks + 1) if ranks % d == 0):
        if (width < ranks) == hybrid:
            yield from _inside(inside, ranks // width, width, dims)


def _inside(inside: str, data: int, width: int, dims: int) -> Iterator[Candidate]:
    if inside in SCHEDULES:
        for micro in MICRO_BATCHES:
            if (inside == "layer" and micro > 1) or (inside == "bidirectional" and micro % 2):
                continue
            for rounds in REPLICATIONS if inside == "gems-master" else (1,):
                yield _candidate(
                    data=data, count=width, schedule=inside, micro_batches=micro, replication=rounds
                )
        return
    way = Way(inside)
    grids = _grids(width, dims) if way is Way.SPATIAL else [(width,)]
    for grid, micro in itertools.product(grids, MICRO_BATCHES):
        for halo in HALOS if way is Way.SPATIAL else HALOS[:1]:
            yield _candidate(data=data, split=Split(way, grid), micro_batches=micro, halo=halo)


def _grids(width: int, dims: int) -> list[tuple[int, ...]]:
    """Return strips and the grid nearest to a cube; the shapes between them lie between in price too."""
    if dims < 1:
        return []
    strips = [tuple(width if d == axis else 1 for d in range(dims)) for axis in range(dims)]
    divisors = [d for d in range(1, width + 1) if width % d == 0]
    grids = [
        (*g, width // math.prod(g))
        for g in itertools.product(divisors, repeat=dims - 1)
        if not width % math.prod(g)
    ]
    return list(dict.fromkeys([min(grids, key=lambda g: (max(g), g)), *strips]))


def _candidate(
    data: int = 1,
    split: Split | None = None,
    count: int = 1,
    schedule: str = "1f1b",
    micro_batches: int = 1,
    replication: int = 1,
    halo: str = "layer",
) -> Candidate:
    return Candidate(
        data=data,
        split=split or Split(),
        count=count,
        singles=0,
        schedule=schedule,
        micro_batches=micro_batches,
        replication=replication,
        halo=halo,
    )
