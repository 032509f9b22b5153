"""Evaluate a plan from sums over layers: bounds on its time, its memory, and a simulation of its passes.

Bounds that no cut of the network can beat. Let t be the seconds of one micro-batch through all layers, S the
stages and M the micro-batches. A stage whose predecessors take P starts no earlier than their forward passes
and is followed by their backward passes, so a step takes at least

    P_s + M t_s        for every stage s

If a step took T, then t_s <= (T - P_s) / M, and what is left of T shrinks by (1 - 1/M) at each stage at most:

    T >= t / (1 - (1 - 1/M)^S)

Each of two directions obeys the same bound with its own half of the micro-batches, and a step takes at least
M t / S because all work must be done. Under GEMS the first rank is busy with one whole round after another:
every round downwards, and those are half of them, takes as long as a pipeline of that round's micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.graph import Graph
from shardwise.machine import Machine
from shardwise.oracle.kernels import KernelTimes
from shardwise.oracle.reductions import BUCKET_BYTES
from shardwise.oracle.search.classes import Sorter
from shardwise.oracle.search.relay import Stages, order_of, run
from shardwise.oracle.search.space import Candidate
from shardwise.oracle.search.tables import Table, Tables
from shardwise.plan import Split, Way
from shardwise.plan.cutting import choose_cuts, crossing_bytes
from shardwise.plan.micro_batches import is_bidirectional

Floats = NDArray[np.float64]
_WHOLE = Split()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a coarse evaluation says: seconds, bytes of the fullest rank, and where the time goes."""

    seconds: float
    peak_bytes: float
    breakdown: dict[str, float]

    @property
    def words(self) -> str:
        """Say what limits the step."""
        parts = sorted(self.breakdown.items(), key=lambda part: -part[1])
        shares = [f"{name} {100 * t / self.seconds:.0f} %" for name, t in parts if t > 0.005 * self.seconds]
        half = 50 * parts[0][1] / self.seconds
        text = f"Limited by {parts[0][0]}: halving that saves about {half:.0f} %"
        return f"{text} ({', '.join(shares)} of the step)."


class Coarse:
    """Evaluate candidates for one network, machine and mini-batch."""

    def __init__(
        self, graph: Graph, machine: Machine, kernels: KernelTimes, *, optimizer_slots: float = 1.0
    ) -> None:
        self.graph, self.machine, self.slots = graph, machine, optimizer_slots
        self.tables = Tables(Sorter(graph), machine, kernels)
        self.crossing = np.array(crossing_bytes(graph), dtype=np.float64)
        self.batch = graph.batch
        self._last: tuple[Candidate, dict[str, Floats]] | None = None
        self._totals: dict[tuple[Split, str, int, int], float] = {}
        self._known_tails: dict[tuple[object, ...], float] = {}
        self._cuts: dict[tuple[object, ...], tuple[int, ...]] = {}

    def samples(self, c: Candidate) -> int:
        """Return the samples of the largest micro-batch."""
        share = -(-self.batch // c.data)
        return -(-share // c.parts)

    def pair(self, c: Candidate) -> tuple[Table, Table | None]:
        """Return the tables of the stages that are split and of the single-rank ones behind them."""
        samples = self.samples(c)
        first = self.tables.table(c.split, c.halo, samples, c.data)
        return first, self.tables.table(_WHOLE, "layer", samples, c.data) if c.singles else None

    def bound(self, c: Candidate) -> float:
        """Return seconds that the candidate cannot beat, wherever the network is cut."""
        samples = self.samples(c)
        if c.singles:
            # Each layer may be on either side of the cut.
            least = self.tables.least(c.split, c.halo, samples)
            return _any_cut(c, least, least / c.stages)
        key = (c.split, c.halo, samples, c.data)
        if key not in self._totals:
            self._totals[key] = self.tables.total(*key)
        total = self._totals[key]
        if c.stages == 1:
            trained = self.tables.totals(c.split, c.halo)[1]
            return c.parts * total + self._reduce_seconds(c, trained, c.split)
        return _any_cut(c, total, total / c.stages)

    def closer_bound(self, c: Candidate) -> float:
        """Return seconds that the candidate cannot beat when the network is cut as the runtime cuts it."""
        sums = self._stage_sums(c)
        times = sums["forward"] + sums["backward"]
        tails = np.array(self._tails(c, sums["trained"]))
        before = np.concatenate(([0.0], np.cumsum(times)))[:-1]
        if not is_bidirectional(c.schedule):
            return float(np.max(before + c.parts * times + tails))
        both = (times + times[::-1]) * c.parts / 2 + tails
        way = _any_cut(c, float(np.sum(times)), 0.0)
        if c.schedule == "bidirectional":
            way = max(way, float(np.max(before + c.parts / 2 * times)))
        return max(way + float(tails.min()), float(np.max(both)))

    def least_bytes(self, c: Candidate) -> float:
        """Return bytes that the fullest rank cannot go below, wherever the network is cut."""
        share = self.samples(c) / self.batch
        saved, trained = self.tables.totals(c.split, c.halo)
        if c.singles:
            saved, trained = min(saved, self.tables.totals(_WHOLE, "layer")[0]), 0.0
        each = (saved * share + (2 + self.slots) * trained) / c.stages
        return self.machine.device.baseline_bytes + each

    def cuts(self, c: Candidate) -> tuple[int, ...]:
        """Return where the runtime would cut."""
        key = (c.split.width, c.count, c.singles)
        if key not in self._cuts:
            self._cuts[key] = choose_cuts(self.graph, c.plan()) if c.stages > 1 else ()
        return self._cuts[key]

    def evaluate(self, c: Candidate) -> Outcome:
        """Return time and memory of a candidate."""
        sums = self._stage_sums(c)
        ahead = self._messages(c)
        stages = Stages(sums["forward"].tolist(), sums["backward"].tolist(), ahead, ahead)
        ends, busy = run(order_of(c.stages, c.schedule, c.micro_batches, c.replication), stages)
        tails = self._tails(c, sums["trained"])
        seconds = float(max(end + tail for end, tail in zip(ends, tails, strict=True)))
        # Last, everybody learns the loss.
        seconds += self.machine.tier((0, c.ranks - 1)).collective_seconds("all_reduce", c.ranks, 8)
        peak = self._peak(c, sums)
        slowest = max(range(c.stages), key=busy.__getitem__)
        parts = {
            "compute and exchanges": busy[slowest],
            "reduction and update": tails[slowest],
            "bubble": seconds - busy[slowest] - tails[slowest],
        }
        return Outcome(seconds, peak, parts)

    def peak_bytes(self, c: Candidate) -> float:
        """Return the bytes of the fullest rank."""
        return self._peak(c, self._stage_sums(c))

    def _stage_sums(self, c: Candidate) -> dict[str, Floats]:
        """Return what the layers of each stage add up to."""
        if self._last is not None and self._last[0] is c:
            return self._last[1]
        first, rest = self.pair(c)
        bounds = np.array([0, *self.cuts(c), len(self.graph.layers)])
        result = {}
        for name in ("forward", "backward", "saved", "weights", "trained", "parcels"):
            sums: Floats = np.diff(getattr(first, name)[bounds])
            if rest is not None:
                sums = np.concatenate((sums[: c.count], np.diff(getattr(rest, name)[bounds])[c.count :]))
            result[name] = sums
        self._last = (c, result)
        return result

    def _tails(self, c: Candidate, trained: Floats) -> list[float]:
        """Return the seconds of every position behind its last backward pass."""
        tails = []
        both = is_bidirectional(c.schedule)
        for t, split in zip(trained.tolist(), _splits(c), strict=True):
            key = (t, split, c.data, c.count, c.singles, both)
            if key not in self._known_tails:
                self._known_tails[key] = self._reduce_seconds(c, t, split)
            tails.append(self._known_tails[key])
        if is_bidirectional(c.schedule):
            tails = [a + b for a, b in zip(tails, reversed(tails), strict=True)]
        return tails

    def _messages(self, c: Candidate) -> list[float]:
        share, splits = self.samples(c) / self.batch, _splits(c)
        result, end = [], 0
        for s, cut in enumerate(self.cuts(c)):
            end += splits[s].width
            narrow = min(splits[s].width, splits[s + 1].width)
            tier = self.machine.tier((end - 1, end))
            result.append(tier.message_seconds(self.crossing[cut] * share / narrow))
        return result

    def _reduce_seconds(self, c: Candidate, trained: float, split: Split) -> float:
        """Return what is left of a stage's gradient sums behind its last backward pass, and its update."""
        device = self.machine.device
        update = trained / (device.update_bytes_per_second or device.memory_bandwidth / 6)
        shared = split.width if split.way is Way.SPATIAL else 1
        count = c.data * shared * (2 if is_bidirectional(c.schedule) else 1)
        if count < 2 or not trained:
            return update
        tier = self.machine.tier((0, c.ranks - 1 if c.data > 1 else split.width * c.stages - 1))
        flows = min(self.machine.node.devices, c.ranks // (c.data * shared)) if c.data > 1 else 1
        seconds = tier.collective_seconds("all_reduce", count, trained, max(1, flows))
        last = min(1.0, BUCKET_BYTES / trained)
        return update + seconds * (last + (1 - last) * (1 - tier.overlap))

    def _peak(self, c: Candidate, sums: dict[str, Floats]) -> float:
        first, rest = self.pair(c)
        order = np.arange(c.stages)
        alive = {
            "1f1b": np.minimum(c.parts, c.stages - order),
            "gems-mast": np.full(c.stages, c.micro_batches),
            "gems-master": np.full(c.stages, c.micro_batches),
            "bidirectional": np.full(c.stages, min(c.parts, c.stages + 1)),
        }.get(c.schedule, np.full(c.stages, c.parts))
        flat = 1 if c.ranks > c.stages or is_bidirectional(c.schedule) else 0
        state = sums["weights"] + sums["parcels"] + (1 + self.slots + flat) * sums["trained"]
        if is_bidirectional(c.schedule):
            state = state + state[::-1]
        largest = max(first.largest, rest.largest if rest else 0.0)
        return float(np.max(sums["saved"] * alive + state)) + 3 * largest + self.machine.device.baseline_bytes


def _splits(c: Candidate) -> list[Split]:
    return [c.split] * c.count + [_WHOLE] * c.singles


def _any_cut(c: Candidate, total: float, share: float) -> float:
    """Return what no cut can beat: `total` are seconds of a micro-batch, `share` of its slowest stage."""
    if c.schedule in ("gems-mast", "gems-master"):
        rounds, parts = c.parts // c.micro_batches, c.micro_batches
    else:
        rounds, parts = 2, c.parts // 2 if c.schedule == "bidirectional" else c.parts
    way = total / (1 - (1 - 1 / parts) ** c.stages) if parts > 1 else total
    return max(rounds / 2 * way, c.parts * share)
