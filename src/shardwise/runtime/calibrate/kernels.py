"""Time what a program computes and copies at its local shapes, in its order, with all cores busy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from shardwise.oracle.kernels import Direction
from shardwise.oracle.lateness import add_meetings, typical_meetings
from shardwise.oracle.moves import Move
from shardwise.oracle.profile import Profile, measured, moved
from shardwise.program import Regrid, StageProgram
from shardwise.runtime.calibrate.chains import Chain, chains_of, sharing
from shardwise.runtime.calibrate.job import measure
from shardwise.runtime.calibrate.overheads import call_overhead
from shardwise.runtime.calibrate.pace import Crowd, Pace
from shardwise.runtime.calibrate.sums import Sums, shared_by
from shardwise.runtime.calibrate.timer import Findings, Result, Timer, Timing
from shardwise.runtime.calibrate.values import Weights
from shardwise.runtime.doctor import memory_bytes
from shardwise.runtime.order import Order, order_of
from shardwise.runtime.poller import cores
from shardwise.runtime.wire import wire_of

# Visits to each chain.
_FEWEST, _MOST = 2, 12
_ONCE = Direction.FORWARD.value
# So many ranks per core stand for all larger crowds.
_CROWD = 4
# The part of the node's memory that weights of all ranks may fill between two visits.
_STORED = 0.3


def profile_kernels(
    profile: Profile,
    programs: Iterable[StageProgram],
    *,
    seconds: float,
    ranks: int | None = None,
    crowd: int = 0,
    transport: str = "gloo",
) -> list[str]:
    """Measure what the profile lacks of some stages, for at most about `seconds`; return what is left.

    Args:
        profile: measurements are added to it; saving is up to the caller.
        programs: the lowered stages.
        seconds: budget of this call.
        ranks: processes that measure the same at once; default one per core.
        crowd: how many of them will share the cores; with more than measure at once, what computations
            take of a core then is measured too.
        transport: over which gradients are summed, and ranks meet that share cores; others meet in memory.
    """
    size = ranks or cores()
    crowded = crowd > size
    chains, refused = chains_of(programs, profile, crowded)
    profile.refused.update(refused)
    if not chains:
        return []
    function = f"{__name__}:time_chains"
    found = measure(
        function,
        (chains, seconds, size),
        size=min(crowd, _CROWD * size) if crowded else size,
        transport=transport,
        seconds=seconds,
        threads=profile.threads,
    )
    collect(profile, chains, found[:size])
    return [key for chain in chains for key in list(chain.keys()) if not profile.knows(key, crowded)]


def collect(profile: Profile, chains: Sequence[Chain], found: Sequence[Findings]) -> None:
    """Add what all ranks found about some chains to a profile."""
    for move, seconds in found[0].sums.items():
        if move.key not in profile.entries:
            profile.add(move.key, moved(move, {_ONCE: seconds}, {_ONCE: 0.0}))
    for chain, *results in zip(chains, *(rank.chains for rank in found), strict=False):
        keys = chain.keys()
        profile.refused.update(results[0].refused)
        room: dict[str, dict[str, float]] = {}
        for (key, direction), nbytes in results[0].room.items():
            room.setdefault(key, {})[direction] = nbytes
        for key in results[0].found:
            if key not in keys:
                continue
            times = [result.found[key] for result in results if key in result.found]
            crowded = {d: fmean(t[d].crowded for t in times) for d in times[0] if times[0][d].crowded}
            known = profile.entries.get(key)
            if known is None:
                _add(profile, key, keys[key], times, room.get(key, {}), crowded)
            elif crowded and not known.crowded:
                # A computation that is measured already keeps its time: predictions do not change by asking.
                profile.add(key, replace(known, crowded=crowded))
        add_meetings(profile.meetings, typical_meetings([result.rounds for result in results]))


def _add(
    profile: Profile,
    key: str,
    what: Any,
    results: list[dict[str, Timing]],
    room: dict[str, float],
    crowded: dict[str, float],
) -> None:
    """Put the times of all ranks together; they did the same, so they differ by chance only.

    The first rank did it alone too.
    """
    seconds = {d: fmean(r[d].seconds for r in results) for d in results[0]}
    wide = {d: fmean(r[d].spread for r in results) for d in results[0]}
    alone = {d: timing.alone for d, timing in results[0].items()}
    if isinstance(what, Move):
        profile.add(key, moved(what, seconds, wide, alone, crowded))
    else:
        profile.add(key, measured(what, seconds, wide, room, alone, crowded))


def time_chains(arguments: Any) -> Findings:
    """Be one rank: run every chain while the other ranks run the same one, until the time is up.

    Only the first ranks do so at first, one for each core; those beyond join them in a crowd in turn.
    """
    chains, seconds, busy = arguments
    results: list[Result] = []
    end = time.perf_counter() + seconds
    size = dist.get_world_size() if dist.is_initialized() else 1
    overhead, pace = call_overhead(), Pace(min(busy, size))
    crowd = Crowd() if size > busy else None
    sums = [Sums(min(busy, size)), *([Sums(shared_by(size))] if crowd is not None else [])]
    layers = [op.layer for chain in chains for op in chain.ops if not isinstance(op, Regrid)]
    order = order_of("auto", layers, torch.device("cpu"), pace.rank, agreed)
    for group in sharing(chains, _STORED * memory_bytes() / size):
        left = agreed(end - time.perf_counter())
        if results and left <= 0:
            break
        share = left * len(group) / (len(chains) - group[0])
        results += _time_group([chains[i] for i in group], share, overhead, pace, crowd, order, sums)
    return Findings(results, {move: seconds for found in sums for move, seconds in found.seconds().items()})


def agreed(seconds: float) -> float:
    """Return what rank 0 says: all ranks measure the same and stop together."""
    value = torch.tensor([seconds], dtype=torch.float64)
    if dist.is_initialized():
        # Who has no core to work on waits here, and sleeps deepest in a sum of the runtime's own.
        wire_of(dist.group.WORLD, range(dist.get_world_size())).all_reduce(torch.zeros(1))
        dist.broadcast(value, 0)
    return float(value)


def _time_group(
    chains: Sequence[Chain],
    seconds: float,
    overhead: float,
    pace: Pace,
    crowd: Crowd | None,
    order: Order,
    sums: Sequence[Sums],
) -> list[Result]:
    """Time some chains in turn: how fast the machine is wavers, and all of them shall meet the same."""
    weights = Weights()
    timers = [Timer(chain, overhead, pace, order, weights) for chain in chains]
    visited = in_turn(timers, pace.rank)
    busy = pace.rank < pace.size

    def go() -> float:
        """Visit all chains once; return how long that took."""
        agreed(0.0)
        start = time.perf_counter()
        if busy:
            visit(visited, pace, sums[0])
        agreed(0.0)
        if crowd is not None:
            for timer in visited:
                timer.crowded(crowd)
            sums[-1].visit()
        return time.perf_counter() - start

    visits = min(_MOST, max(_FEWEST, seconds / max(go(), 1e-6)))
    for _ in range(int(agreed(visits)) - 1):
        go()
    agreed(0.0)
    return [timer.result() if busy else Result({}, {}, {}) for timer in timers]


def in_turn(timers: Sequence[Timer], rank: int) -> list[Timer]:
    """Return timers in the order in which a rank visits them: stages of a pipeline beside each other.

    All ranks do the same at the same time in tiles; in a pipeline each is at a stage of its own, and two of
    them want the same of the memory only by chance.
    """
    alike = [timer for timer in timers if not timer.chain.is_lone]
    lone = [timer for timer in timers if timer.chain.is_lone]
    first = rank % max(1, len(lone))
    return [*alike, *lone[first:], *lone[:first]]


def visit(timers: Sequence[Timer], pace: Pace, sums: Sums | None = None) -> None:
    """Go through all chains on all ranks that have a core, and then on the first rank only.

    How fast the machine is wavers; what is compared is timed together.
    """
    for timer in timers:
        timer.visit()
    if sums is not None:
        sums.visit()
    pace.meet()
    if pace.rank == 0:
        for timer in timers:
            timer.alone()
    # The others wait for it, on their cores as ranks do that wait for a message.
    pace.meet()
