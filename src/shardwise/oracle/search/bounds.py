"""What no cut of the network can beat, for all plans of a family at once: columns of numbers, one row a plan.

Let t be the seconds of one micro-batch through all layers, S the stages and M the micro-batches. A stage
whose predecessors take P starts no earlier than their forward passes and is followed by their backward
passes, so a step takes at least

    P_s + M t_s        for every stage s

If a step took T, then t_s <= (T - P_s) / M, and what is left of T shrinks by (1 - 1/M) at each stage at most:

    T >= t / (1 - (1 - 1/M)^S)

Each of two directions obeys the same bound with its own half of the micro-batches, and a step takes at least
M t / S because all work must be done. Under GEMS the first rank is busy with one whole round after another:
every round downwards, and those are half of them, takes as long as a pipeline of that round's micro-batches.
Where backward is split only its first part is waited for.

A rank of stage s holds a_s micro-batches of saved bytes v_s and a state z_s. If none held more than L, then
v_s <= (L - z_s) / a_s, and summed over the stages

    L >= (v + z / max a) / sum of 1 / a_s

Where only the first stages are split, everything depends on where they end: what the slowest of them costs at
least rises with that end, what the others cost falls, and no end is better than the one where the two cross.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.oracle.search.space import Candidate, Shape, Timing, timings
from shardwise.plan import Split
from shardwise.plan.micro_batches import is_bidirectional

Floats = NDArray[np.float64]
Ints = NDArray[np.int_]
Bools = NDArray[np.bool_]

# The last one is the same as `layer`, but some ask for it by this name.
TIMINGS: tuple[Timing, ...] = (*timings(2), *timings(1), Timing("gpipe", 1, 1))
_NUMBERS = {timing: number for number, timing in enumerate(TIMINGS)}
_FIRST = {1: len(timings(2)), 2: 0}
_PARTS = np.array([t.parts for t in TIMINGS])
_ROUNDS = np.array([t.rounds for t in TIMINGS])
_BOTH = np.array([is_bidirectional(t.schedule) for t in TIMINGS])
_SPLITS = np.array([t.schedule == "zero-bubble" for t in TIMINGS])
_CHIMERA = np.array([t.schedule == "bidirectional" for t in TIMINGS])
_FEW_ALIVE = np.array([t.schedule in ("1f1b", "zero-bubble", "bidirectional") for t in TIMINGS])
_FALLING = np.array([t.schedule == "1f1b" for t in TIMINGS])


@dataclass(frozen=True)
class Rows:
    """All plans that split their stages in one way: `shape` and `timing` say which, as indices."""

    split: Split
    halo: str
    shapes: Sequence[Shape]
    shape: Ints
    timing: Ints
    stages: Ints
    singles: Ints
    data: Ints
    samples: Ints

    def __len__(self) -> int:
        return len(self.shape)

    @property
    def parts(self) -> Ints:
        """Return the micro-batches of a replica."""
        return _PARTS[self.timing]

    @property
    def both(self) -> Bools:
        """Tell which plans send micro-batches both ways."""
        return _BOTH[self.timing]

    def only(self, mask: Bools | NDArray[np.intp] | slice) -> Rows:
        """Return some of the plans."""
        columns = (self.shape, self.timing, self.stages, self.singles, self.data, self.samples)
        return Rows(self.split, self.halo, self.shapes, *(column[mask] for column in columns))


def rows_of(split: Split, halo: str, shapes: Sequence[Shape], batch: int) -> Rows:
    """Return all plans of these shapes; `samples` are those of the largest micro-batch."""
    counts = [len(timings(shape.stages)) for shape in shapes]
    first = [_FIRST[min(2, shape.stages)] for shape in shapes]
    which = np.repeat(np.arange(len(shapes)), counts)
    timing = np.concatenate([np.arange(a, a + n) for a, n in zip(first, counts, strict=True)] or [which])
    return _rows(split, halo, shapes, which, timing, batch)


def _rows(split: Split, halo: str, shapes: Sequence[Shape], which: Ints, timing: Ints, batch: int) -> Rows:
    columns = np.array([(s.stages, s.singles, s.data) for s in shapes]).reshape(-1, 3)[which].T
    share = (batch + columns[2] - 1) // columns[2]
    samples = (share + _PARTS[timing] - 1) // _PARTS[timing]
    return Rows(split, halo, shapes, which, timing, columns[0], columns[1], columns[2], samples)


def rows_of_candidates(found: Iterable[Candidate], batch: int) -> list[Rows]:
    """Return some plans as rows: those with one split and halo together, in the given order."""
    alike: dict[tuple[Split, str], list[Candidate]] = {}
    for c in found:
        alike.setdefault((c.split, c.halo), []).append(c)
    result = []
    for (split, halo), plans in alike.items():
        shapes = list(dict.fromkeys(Shape(c.count, c.singles, c.data) for c in plans))
        which = np.array([shapes.index(Shape(c.count, c.singles, c.data)) for c in plans])
        timing = np.array([_NUMBERS[Timing(c.schedule, c.micro_batches, c.replication)] for c in plans])
        order = np.argsort(which, kind="stable")
        result.append(_rows(split, halo, shapes, which[order], timing[order], batch))
    return result


def least_seconds(rows: Rows, total: Floats, weight: Floats, slowest: Floats) -> Floats:
    """Return seconds that no cut can beat.

    Args:
        rows: the plans.
        total: seconds of one micro-batch through all layers, both ways.
        weight: the part of them that only makes gradients of weights.
        slowest: seconds of one micro-batch in the slowest stage, at least.
    """
    parts, rounds = rows.parts, _ROUNDS[rows.timing]
    waits = total - np.where(_SPLITS[rows.timing], weight, 0.0)
    in_row = np.where(_CHIMERA[rows.timing], parts // 2, parts // rounds)
    way = waits / (1 - (1 - 1 / in_row) ** rows.stages)
    # Of two directions a rank may play the slowest stage in one of them only.
    busy = np.where(_BOTH[rows.timing], np.maximum(slowest / 2, total / rows.stages), slowest)
    return np.maximum(np.maximum(rounds / 2, 1) * way, parts * busy)


def least_at_cuts(rows: Rows, both: Floats, weight: Floats) -> Floats:
    """Return seconds that no plan can beat whose stages take so long.

    Args:
        rows: the plans, all with the same number of stages.
        both: seconds of one micro-batch in every stage, both ways.
        weight: the part of them that only makes gradients of weights.
    """
    parts, rounds = rows.parts, _ROUNDS[rows.timing]
    waits = both - _SPLITS[rows.timing][:, None] * weight
    in_row = np.where(_CHIMERA[rows.timing], parts // 2, parts // rounds)
    before = np.cumsum(waits, axis=1) - waits
    way = (before + in_row[:, None] * waits).max(axis=1)
    busy = np.where(_BOTH[rows.timing][:, None], (both + both[:, ::-1]) / 2, both).max(axis=1)
    least: Floats = np.maximum(np.maximum(rounds / 2, 1) * way, parts * busy)
    return least


def least_bytes(rows: Rows, saved: Floats, state: Floats) -> Floats:
    """Return bytes that the fullest rank cannot go below.

    Args:
        rows: the plans.
        saved: bytes that all layers keep of one micro-batch.
        state: bytes of all layers that do not depend on the micro-batches.
    """
    most = alive(rows.timing, rows.stages, np.zeros_like(rows.stages))
    twice = np.where(_BOTH[rows.timing], 2.0, 1.0)
    return (saved + twice * state / most) / _inverse_alive(rows)


def _inverse_alive(rows: Rows, last: Ints | None = None) -> Floats:
    """Return the sum of 1 / a_s over the stages, or over the last ones of them."""
    stages = rows.stages if last is None else last
    most = alive(rows.timing, rows.stages, np.zeros_like(rows.stages))
    # Under 1F1B the later a stage the fewer it holds: 1, 2, 3 ... from the last one on, up to M.
    steps = np.concatenate(([0.0], np.cumsum(1 / np.arange(1, int(rows.stages.max(initial=1)) + 1))))
    rising = np.minimum(rows.parts, stages)
    falling = steps[rising] + (stages - rising) / rows.parts
    return np.where(_FALLING[rows.timing], falling, stages / most)


def alive_in_front(rows: Rows) -> tuple[Floats, Floats, Floats]:
    """Return how many micro-batches the first stage holds, and sums of 1 / a_s: of tiled, of single ones."""
    first = alive(rows.timing, rows.stages, np.zeros_like(rows.stages)).astype(np.float64)
    behind = _inverse_alive(rows, rows.singles)
    return first, _inverse_alive(rows) - behind, behind


def crossing(
    rises: Callable[[Ints], Floats], falls: Callable[[Ints], Floats], low: Ints, last: int
) -> Floats:
    """Return the least possible larger one of a quantity that rises with a place and one that falls.

    Args:
        rises, falls: the quantities of all rows, each at a place of its own.
        low: the first place of every row.
        last: the last place.
    """
    first, high = low, np.full(len(low), last)
    while np.any(low < high):
        middle = (low + high) // 2
        over = rises(middle) >= falls(middle)
        low, high = np.where(over, low, middle + 1), np.where(over, middle, high)
    before = np.maximum(low - 1, first)
    return np.minimum(np.maximum(rises(low), falls(low)), np.maximum(rises(before), falls(before)))


def alive(timing: Ints, stages: Ints, stage: Ints) -> Ints:
    """Return how many micro-batches a stage holds at once."""
    parts, rounds = _PARTS[timing], _ROUNDS[timing]
    held = np.where(_FALLING[timing], stages - stage, stages + _CHIMERA[timing])
    found: Ints = np.where(_FEW_ALIVE[timing], np.minimum(parts, held), parts // rounds)
    return found
