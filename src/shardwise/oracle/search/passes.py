"""When the ranks of a pipeline are done, by recurrences over all stages at once.

The passes of one micro-batch go from stage to stage; each waits for the one before it and for its own rank:

    end(s) = max(free(s), end(s-1) + message(s-1)) + seconds(s)

With D(s) the seconds and messages up to stage s this is D(s) + max over k <= s of
free(k) - D(k) + seconds(k), a running maximum. GPipe and GEMS are such waves one after another. Under 1F1B
the forwards that are the k-th ones in front of a backward depend only on what was k-1-st, so they need no
wave at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.oracle.search.space import Timing

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Stages:
    """Seconds of one micro-batch in every stage, and of the messages behind every stage but the last.

    `weight` is the part of `backward` that only makes gradients of weights.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    message: Floats


def ends_of(stages: Stages, timing: Timing) -> Floats:
    """Return when the rank of every position is done with its last pass.

    Args:
        stages: what the passes cost.
        timing: any schedule whose order has a closed form: all but `bidirectional`.
    """
    parts = timing.parts
    if timing.schedule in ("layer", "gpipe"):
        return _round(_Waves(stages), np.zeros(len(stages.forward)), parts)
    if timing.schedule == "1f1b":
        return _one_forward_one_backward(_Waves(stages), parts, stages.forward, np.zeros_like(stages.weight))
    if timing.schedule == "zero-bubble":
        inputs = Stages(stages.forward, stages.backward - stages.weight, stages.weight, stages.message)
        return _one_forward_one_backward(_Waves(inputs), parts, stages.forward, stages.weight)
    if timing.schedule in ("gems-mast", "gems-master"):
        waves, clock = _Waves(stages), np.zeros(len(stages.forward))
        for _ in range(timing.rounds):
            # The next round flows the other way: seen from the other end it is the same.
            clock = _round(waves, clock, timing.micro_batches)[::-1]
        return clock
    raise ValueError(f"schedule: {timing.schedule!r} has no closed form; simulate its orders")


class _Waves:
    def __init__(self, stages: Stages) -> None:
        self.message = stages.message
        self.down, self.before = _along(stages.forward, stages.message)
        self.up, self.behind = _along(stages.backward[::-1], stages.message[::-1])

    def forward(self, free: Floats) -> Floats:
        """Return when each stage ends the forward of a micro-batch."""
        return self.down + np.maximum.accumulate(free - self.before)

    def backward(self, free: Floats) -> Floats:
        """Return when each stage ends the backward of a micro-batch."""
        return (self.up + np.maximum.accumulate(free[::-1] - self.behind))[::-1]


def _along(seconds: Floats, message: Floats) -> tuple[Floats, Floats]:
    """Return when a lonely micro-batch ends and begins in each stage."""
    ends = np.cumsum(seconds)
    ends[1:] += np.cumsum(message)
    return ends, ends - seconds


def _round(waves: _Waves, clock: Floats, parts: int) -> Floats:
    """Run all forwards, then all backwards."""
    for _ in range(parts):
        clock = waves.forward(clock)
    for _ in range(parts):
        clock = waves.backward(clock)
    return clock


def _one_forward_one_backward(waves: _Waves, parts: int, forward: Floats, weight: Floats) -> Floats:
    """Run S - s forwards in stage s, then backward and forward in turn; weights' parts s backwards later."""
    count = len(forward)
    stage = np.arange(count)
    clock, first = np.zeros(count), np.zeros(count)
    for m in range(min(parts, count)):
        clock = waves.forward(clock)
        # The last forward in front of the first backward.
        first = np.where(count - stage - 1 >= m, clock, first)
    ends = waves.backward(first)
    for k in range(1, parts):
        free = ends + np.where(k > stage, weight, 0.0)
        arrives = np.concatenate(([-np.inf], first[:-1] + waves.message))
        first = np.where(stage >= k + count - parts, np.maximum(arrives, free) + forward, free)
        ends = waves.backward(first)
    result: Floats = ends + weight * (parts - np.maximum(0, parts - 1 - stage))
    return result
