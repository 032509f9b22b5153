"""What the stages of a plan cost where the runtime would cut the network: closer bounds, and a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.machine import Machine
from shardwise.oracle.reductions import BUCKET_BYTES
from shardwise.oracle.search.bounds import TIMINGS, Ints, alive
from shardwise.oracle.search.passes import Stages, ends_of
from shardwise.oracle.search.relay import order_of, run
from shardwise.oracle.search.space import Shape
from shardwise.oracle.search.tables import Family
from shardwise.plan import Way
from shardwise.plan.micro_batches import is_bidirectional

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation says: seconds, bytes of the fullest rank, and where the time goes."""

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


class Pipeline:
    """One shape of a family, cut into stages: all its timings share what the stages cost.

    Args:
        family: how the split stages are split.
        whole: layers that are not split, for single-rank stages.
        shape: stages and replicas.
        bounds: the first layer of every stage, and the number of layers.
        crossing: bytes of the values that cross in front of every layer, of one sample.
        slots: copies of the parameters that the optimizer keeps.
    """

    def __init__(
        self, family: Family, whole: Family, shape: Shape, bounds: Ints, crossing: Floats, slots: float
    ) -> None:
        self.family, self.whole, self.shape, self.slots = family, whole, shape, slots
        self.machine: Machine = family.tables.machine
        self.width, self.stages = family.split.width, shape.stages
        self.widths = np.array([self.width] * shape.count + [1] * shape.singles)
        self.ranks = shape.data * int(self.widths.sum())
        self.cuts, self.crossing = bounds, crossing[bounds[1:-1]]
        self.saved, self.weights = self._bytes("saved"), self._bytes("weights")
        self.trained, self.parcels = self._bytes("trained"), self._parcels()

    @cached_property
    def forward(self) -> Floats:
        """Return the seconds of every stage forwards, a row for each number of samples."""
        return self._seconds("forward", 0)

    @cached_property
    def backward(self) -> Floats:
        """Return the same backwards."""
        return self._seconds("backward", 1)

    @cached_property
    def weight(self) -> Floats:
        """Return the part of backward that only makes gradients of weights."""
        return self._seconds("weight", None)

    def _seconds(self, name: str, statistics: int | None) -> Floats:
        """Return a row for each number of samples of the family, a column for each stage."""
        found: Floats = np.diff(getattr(self.family.sums, name)[:, self.cuts])
        if statistics is not None:
            found += np.diff(self.family.statistics(self.shape.data)[statistics][self.cuts])
        if self.shape.singles:
            rows = [self.whole.samples[n] for n in self.family.samples]
            rest: Floats = np.diff(getattr(self.whole.sums, name)[rows][:, self.cuts])
            if statistics is not None:
                rest += np.diff(self.whole.statistics(self.shape.data)[statistics][self.cuts])
            found[:, self.shape.count :] = rest[:, self.shape.count :]
        return found

    def _computing(self, samples: int) -> Floats:
        """Return the part of every stage's seconds that no exchange takes."""
        row, count = self.family.samples[samples], self.shape.count
        found: Floats = np.diff(self.family.sums.computing[row][self.cuts])
        if self.shape.singles:
            rest = np.diff(self.whole.sums.computing[self.whole.samples[samples]][self.cuts])
            found[count:] = rest[count:]
        return found

    def _bytes(self, name: str) -> Floats:
        found: Floats = np.diff(getattr(self.family.sums, name)[self.cuts])
        if self.shape.singles:
            rest = np.diff(getattr(self.whole.sums, name)[self.cuts])
            found[self.shape.count :] = rest[self.shape.count :]
        return found

    def _parcels(self) -> Floats:
        """Return the buffers of the largest exchange of every stage."""
        found = self.family.tables.largest(self.family.sums.parcels, self.cuts)
        if self.shape.singles:
            rest = self.family.tables.largest(self.whole.sums.parcels, self.cuts)
            found[self.shape.count :] = rest[self.shape.count :]
        return found

    @cached_property
    def message(self) -> Floats:
        """Return the seconds of the messages behind every stage but the last, for each number of samples."""
        result = np.zeros((len(self.family.samples), self.stages - 1))
        narrow = np.minimum(self.widths[:-1], self.widths[1:])
        ends = np.cumsum(self.widths)[:-1]
        left = np.ones(self.stages - 1, dtype=bool)
        for tier in self.machine.network:
            inside = left & ((ends - 1) // tier.span == ends // tier.span) if tier.span else left
            left = left & ~inside
            sizes, where = np.unique(self.crossing[inside] / narrow[inside], return_inverse=True)
            for row, samples in enumerate(self.family.samples):
                times = np.array([tier.message_seconds(size * samples) for size in sizes.tolist()])
                result[row, inside] = times[where]
        return result

    def tails(self, both: bool) -> Floats:
        """Return the seconds of every position behind its last backward pass."""
        return self._tails_both if both else self._tails_one

    @cached_property
    def _tails_one(self) -> Floats:
        return self._tails(False)

    @cached_property
    def _tails_both(self) -> Floats:
        tails = self._tails(True)
        return tails + tails[::-1]

    def _tails(self, both: bool) -> Floats:
        keys = np.stack((self.trained, self.widths))
        distinct, where = np.unique(keys, axis=1, return_inverse=True)
        times = [self._reduce_seconds(t, int(w), both) for t, w in distinct.T.tolist()]
        return np.array(times)[where.reshape(-1)]

    def _reduce_seconds(self, trained: float, width: int, both: bool) -> float:
        """Return what is left of a stage's gradient sums behind its last backward pass, and its update."""
        device, data = self.machine.device, self.shape.data
        update = trained / (device.update_bytes_per_second or device.memory_bandwidth / 6)
        shared = width if self.family.split.way is Way.SPATIAL else 1
        count = data * shared * (2 if both else 1)
        if count < 2 or not trained:
            return update
        tier = self.machine.tier((0, self.ranks - 1 if data > 1 else width * self.stages - 1))
        flows = min(self.machine.node.devices, self.ranks // (data * shared)) if data > 1 else 1
        seconds = tier.collective_seconds("all_reduce", count, trained, max(1, flows))
        last = min(1.0, BUCKET_BYTES / trained)
        return update + seconds * (last + (1 - last) * (1 - tier.overlap))

    @cached_property
    def loss_seconds(self) -> float:
        """Return how long it takes in the end to tell everybody the loss."""
        return self.machine.tier((0, self.ranks - 1)).collective_seconds("all_reduce", self.ranks, 8)

    def input_seconds(self, both: bool) -> float:
        """Return how long the first ranks of a pipeline read their parts of the mini-batch.

        All that read on a node share its rate; with two directions both ends read a half.
        """
        machine, tables = self.machine, self.family.tables
        rate = machine.input_bytes_per_second
        if not rate:
            return 0.0
        width, positions = int(self.widths[0]), int(self.widths.sum())
        per_node = min(max(machine.node.devices, machine.crowd), self.ranks)
        ends = 2 if both else 1
        readers = min(per_node, ends * width * max(1, per_node // positions))
        own = tables.input_bytes / (self.shape.data * width * ends)
        return own * readers / rate

    def shared_seconds(self, timing: int, samples: int) -> float:
        """Return how long the cores need for the work of all ranks, where these take turns on them."""
        cores, when = self.machine.shared_cores(self.ranks), TIMINGS[timing]
        if not cores:
            return 0.0
        stages = self.stages_of(samples)
        work = when.parts * (stages.forward + stages.backward) + self._updates
        return self.shape.data * float((work * self.widths).sum()) / cores

    @cached_property
    def _updates(self) -> Floats:
        return np.array([self.machine.device.update_seconds([trained]) for trained in self.trained.tolist()])

    def stages_of(self, samples: int) -> Stages:
        """Return the seconds of a micro-batch."""
        row = self.family.samples[samples]
        return Stages(self.forward[row], self.backward[row], self.weight[row], self.message[row])

    def closer(self, timing: Ints, samples: Ints) -> Floats:
        """Return seconds that these timings cannot beat; see `bounds` for the reasons."""
        rows = np.array([self.family.samples[n] for n in samples.tolist()])
        schedules = [TIMINGS[i].schedule for i in timing.tolist()]
        parts = np.array([TIMINGS[i].parts for i in timing.tolist()])[:, None]
        micro = np.array([TIMINGS[i].micro_batches for i in timing.tolist()])[:, None]
        one, pair = self.tails(False), self.tails(True)
        # Where backward is split the stages before wait only for its first part.
        late = np.array([s == "zero-bubble" for s in schedules])[:, None] * self.weight[rows]
        both = self.forward[rows] + self.backward[rows]
        there = _before(self.forward[rows] + _padded(self.message[rows]))
        back = _before(self.backward[rows] - late + _padded(self.message[rows]))
        straight = np.maximum(
            (there + parts * both + one).max(axis=1),
            (there + parts * (both - late) + back).max(axis=1) + late[:, 0] + one[0],
        )
        busy = (parts / 2 * (both + both[:, ::-1]) + pair).max(axis=1)
        # One direction of two: its own half of the micro-batches.
        half = (there + parts / 2 * both + back).max(axis=1) + pair.min()
        # The first rank goes through half of the rounds as stage 0, through the others as the last stage.
        whole = (there + micro * both + back).max(axis=1) + micro[:, 0] * both[:, -1]
        rounds = (parts / micro)[:, 0] / 2 * whole + pair[0]
        ways = {"bidirectional": np.maximum(busy, half)}
        ways |= dict.fromkeys(("gems-mast", "gems-master"), np.maximum(busy, rounds))
        names = np.array(schedules)
        result = straight
        for name, values in ways.items():
            result = np.where(names == name, values, result)
        found: Floats = result + self.loss_seconds
        shared = np.zeros(len(found))
        if self.machine.shared_cores(self.ranks):
            pairs = zip(timing.tolist(), samples.tolist(), strict=True)
            shared = np.array([self.shared_seconds(t, n) for t, n in pairs])
        reading = {both: self.input_seconds(both) for both in (False, True)}
        read = np.array([reading[is_bidirectional(name)] for name in schedules])
        least: Floats = np.maximum(found, shared) + read
        return least

    def peaks(self, timing: Ints, samples: Ints) -> Floats:
        """Return the bytes of the fullest rank."""
        each = samples[:, None]
        both = np.array([is_bidirectional(TIMINGS[i].schedule) for i in timing.tolist()])[:, None]
        held = alive(timing[:, None], np.array(self.stages), np.arange(self.stages))
        # Sums travel in a flat copy of the gradients.
        flat = both | (self.ranks > self.stages)
        state = self.weights + each * self.parcels + (1 + self.slots + flat) * self.trained
        state = state + both * state[:, ::-1]
        largest = max(self.family.largest, self.whole.largest if self.shape.singles else 0.0)
        fullest: Floats = (each * self.saved * held + state).max(axis=1)
        return fullest + 3 * largest * samples + self.machine.device.baseline_bytes

    def evaluate(self, timing: int, samples: int) -> Outcome:
        """Return time and memory of one timing."""
        when = TIMINGS[timing]
        stages, both = self.stages_of(samples), is_bidirectional(when.schedule)
        if when.schedule == "bidirectional":
            ends = run(order_of(self.stages, when), stages)
        else:
            ends = ends_of(stages, when)
        tails = self.tails(both)
        alone = float(np.max(ends + tails)) + self.loss_seconds
        shared, reading = self.shared_seconds(timing, samples), self.input_seconds(both)
        seconds = max(alone, shared) + reading
        busy = when.parts * (stages.forward + stages.backward)
        if both:
            busy = (busy + busy[::-1]) / 2
        slowest = int(np.argmax(busy))
        computing = when.parts * self._computing(samples)
        if both:
            computing = (computing + computing[::-1]) / 2
        mine = float(min(computing[slowest], busy[slowest]))
        parts = {
            "compute": mine,
            "exchanges": float(busy[slowest]) - mine,
            "reduction and update": float(tails[slowest]),
            "input": reading,
            "turns on cores" if shared > alone else "bubble": (
                max(alone, shared) - float(busy[slowest] + tails[slowest])
            ),
        }
        peak = self.peaks(np.array([timing]), np.array([samples]))
        return Outcome(seconds, float(peak[0]), parts)


def _before(values: Floats) -> Floats:
    """Return the sums in front of every column."""
    return np.cumsum(values, axis=1) - values


def _padded(messages: Floats) -> Floats:
    return np.concatenate((messages, np.zeros((len(messages), 1))), axis=1)
