"""Time what a program computes and copies at its local shapes, in its order, with all cores busy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from shardwise.oracle.kernels import Direction
from shardwise.oracle.moves import Move
from shardwise.oracle.profile import Profile, measured, moved
from shardwise.program import StageProgram
from shardwise.runtime.calibrate.chains import Chain, chains_of
from shardwise.runtime.calibrate.job import measure
from shardwise.runtime.calibrate.overheads import call_overhead
from shardwise.runtime.calibrate.pace import Pace
from shardwise.runtime.calibrate.timer import Result, Timer
from shardwise.runtime.poller import cores

_FEWEST, _MOST = 3, 15


def profile_kernels(
    profile: Profile,
    programs: Iterable[StageProgram],
    *,
    seconds: float,
    ranks: int | None = None,
) -> list[str]:
    """Measure what the profile lacks of some stages, for at most about `seconds`; return what is left.

    Args:
        profile: measurements are added to it; saving is up to the caller.
        programs: the lowered stages.
        seconds: budget of this call.
        ranks: processes that measure the same at once; default one per core.
    """
    chains, refused = chains_of(programs, profile)
    profile.refused.update(refused)
    if not chains:
        return []
    function = f"{__name__}:time_chains"
    size = ranks or cores()
    found = measure(
        function, (chains, seconds), size=size, transport="gloo", seconds=seconds, threads=profile.threads
    )
    collect(profile, chains, found)
    return [key for chain in chains for key in list(chain.keys()) if not profile.knows(key)]


def collect(profile: Profile, chains: Sequence[Chain], found: Sequence[Sequence[Result]]) -> None:
    """Add what all ranks found about some chains to a profile."""
    for chain, *results in zip(chains, *found, strict=False):
        keys = chain.keys()
        profile.refused.update(results[0].refused)
        room: dict[str, dict[str, float]] = {}
        for (key, direction), nbytes in results[0].room.items():
            room.setdefault(key, {})[direction] = nbytes
        for key in results[0].found:
            # A computation that is measured already keeps its time: predictions do not change by asking.
            if key in keys and key not in profile.entries:
                times = [result.found[key] for result in results if key in result.found]
                _add(profile, key, keys[key], times, room.get(key, {}))
        if all(result.waited for result in results):
            profile.worked += fmean(result.worked for result in results)
            profile.waited += fmean(result.waited for result in results)


def _add(
    profile: Profile,
    key: str,
    what: Any,
    results: list[dict[str, tuple[float, float, float]]],
    room: dict[str, float],
) -> None:
    """Put the times of all ranks together; they did the same, so they differ by chance only.

    The first rank did it alone too.
    """
    seconds = {d: fmean(r[d][0] for r in results) for d in results[0]}
    wide = {d: fmean(r[d][1] for r in results) for d in results[0]}
    alone = {d: faster for d, (_, _, faster) in results[0].items()}
    if isinstance(what, Move):
        once = Direction.FORWARD.value
        profile.add(key, moved(what, seconds[once], wide[once], alone[once]))
    else:
        profile.add(key, measured(what, seconds, wide, room, alone))


def time_chains(arguments: Any) -> list[Result]:
    """Be one rank: run every chain while the other ranks run the same one, until the time is up."""
    chains, seconds = arguments
    results: list[Result] = []
    end = time.perf_counter() + seconds
    overhead, pace = call_overhead(), Pace()
    for i, chain in enumerate(chains):
        left = _agreed(end - time.perf_counter())
        if results and left <= 0:
            break
        results.append(_time_chain(chain, left / (len(chains) - i), overhead, pace))
    return results


def _agreed(seconds: float) -> float:
    """Return what rank 0 says: all ranks measure the same and stop together."""
    value = torch.tensor([seconds], dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(value, 0)
    return float(value)


def _time_chain(chain: Chain, seconds: float, overhead: float, pace: Pace) -> Result:
    timer = Timer(chain, overhead, pace)
    start = time.perf_counter()
    timer.round()
    once = time.perf_counter() - start
    rounds = int(_agreed(min(_MOST, max(_FEWEST, seconds / max(once, 1e-6)))))
    for _ in range(rounds - 1):
        timer.round()
    if not dist.is_initialized() or dist.get_rank() == 0:
        for _ in range(_FEWEST):
            timer.alone()
    # The others wait for rank 0, on their cores as ranks do that wait for a message.
    pace.meet()
    _agreed(0.0)
    return timer.result()
