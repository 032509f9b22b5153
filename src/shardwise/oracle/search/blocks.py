"""Find the blocks that a deep network repeats, so that each of them has to be looked at only once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LONGEST = 256


@dataclass(frozen=True, slots=True)
class Block:
    """Some consecutive layers; blocks of one `number` have the same layers, joined in the same way."""

    start: int
    stop: int
    number: int


def blocks_of(codes: Sequence[int]) -> list[Block]:
    """Cut a list of codes into blocks: repeated runs of codes, and single ones between them."""
    bounds: list[tuple[int, int]] = []
    _cut(np.asarray(codes), 0, len(codes), bounds)
    numbers: dict[tuple[int, ...], int] = {}
    return [
        Block(start, stop, numbers.setdefault(tuple(codes[start:stop]), len(numbers)))
        for start, stop in sorted(bounds)
    ]


def _cut(codes: NDArray[np.int_], start: int, stop: int, bounds: list[tuple[int, int]]) -> None:
    """Take the longest repetition between two places, then look before and behind it."""
    period, first, last = _longest(codes[start:stop])
    if not period:
        bounds.extend((i, i + 1) for i in range(start, stop))
        return
    first, count = start + first, (last - first) // period
    end = first + count * period
    bounds.extend((first + i * period, first + (i + 1) * period) for i in range(count))
    _cut(codes, start, first, bounds)
    _cut(codes, end, stop, bounds)


def _longest(codes: NDArray[np.int_]) -> tuple[int, int, int]:
    """Return the period, the begin and the end of the longest run that repeats at least twice."""
    best = (0, 0, 0)
    for period in range(1, min(_LONGEST, len(codes) // 2) + 1):
        same = np.concatenate(([False], codes[period:] == codes[:-period], [False]))
        turns = np.flatnonzero(same[1:] != same[:-1])
        if not len(turns):
            continue
        starts, ends = turns[::2], turns[1::2]
        at = int(np.argmax(ends - starts))
        length = int(ends[at] - starts[at]) + period
        # What a longer period gains must be worth it: it repeats the shorter one's blocks.
        if length >= 2 * period and length > best[2] - best[1]:
            best = (period, int(starts[at]), int(starts[at]) + length)
    return best
