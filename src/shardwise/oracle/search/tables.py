"""Seconds and bytes of every layer under a split, for any number of samples, as running sums."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.geometry import Box
from shardwise.graph import Source
from shardwise.machine import Machine, Tier
from shardwise.oracle.kernels import WEIGHTED, Direction, KernelTimes, Roofline, Task
from shardwise.oracle.search.classes import Classes, LayerClass, Sorter
from shardwise.oracle.search.many import ManyRooflines
from shardwise.plan import Split

Floats = NDArray[np.float64]
_WHOLE = Split()
_MOST_TABLES = 256


@dataclass(frozen=True)
class Table:
    """Running sums over the layers of the graph: entry i counts the layers before i.

    `forward` and `backward` are seconds of one micro-batch, communication inside the group included;
    `saved` are bytes of activations kept for backward, `weights` and `trained` bytes of one rank.
    `parcels` are the buffers of exchanges, `largest` is the largest value that any layer makes.
    """

    forward: Floats
    backward: Floats
    saved: Floats
    weights: Floats
    trained: Floats
    parcels: Floats
    largest: float

    @cached_property
    def both(self) -> Floats:
        """Return forward and backward together."""
        return self.forward + self.backward


class Tables:
    """Make tables for one network on one machine; classes, prices and sums are remembered."""

    def __init__(self, sorter: Sorter, machine: Machine, kernels: KernelTimes) -> None:
        self.sorter, self.machine, self.kernels = sorter, machine, kernels
        self.batch, self.length = sorter.graph.batch, len(sorter.graph.layers)
        self._classes: dict[tuple[Split, str], Classes] = {}
        self._prices: dict[tuple[Split, str, int], tuple[Floats, Floats]] = {}
        self._statistics: dict[tuple[Split, str, int], tuple[Floats, Floats]] = {}
        self._sizes: dict[tuple[Split, str], tuple[Floats, Floats, Floats, Floats, float]] = {}
        self._tables: dict[tuple[Split, str, int, int], Table] = {}
        self._many: dict[int, ManyRooflines] = {}
        self._least: dict[tuple[Split, str, int], float] = {}
        self._whole: dict[tuple[Split, str], tuple[float, float]] = {}
        self._kernel: dict[tuple[object, ...], tuple[float, float]] = {}

    def table(self, split: Split, halo: str, samples: int, replicas: int) -> Table:
        """Return the sums for micro-batches of so many samples, with statistics over so many replicas."""
        key = (split, halo, samples, replicas)
        found = self._tables.pop(key, None)
        # Tables are as long as the network; those that were asked for last are kept.
        self._tables[key] = found if found is not None else self._table(*key)
        if len(self._tables) > _MOST_TABLES:
            del self._tables[next(iter(self._tables))]
        return self._tables[key]

    def total(self, split: Split, halo: str, samples: int, replicas: int) -> float:
        """Return the seconds of one micro-batch through all layers, both ways."""
        there, back = self._statistics_of(split, halo, replicas)
        forward, backward = self._prices_of(split, halo, samples)
        return float(self.classes(split, halo).counts @ (forward + backward + there + back))

    def least(self, split: Split, halo: str, samples: int) -> float:
        """Return the seconds through all layers when each takes the better of this split and none."""
        key = (split, halo, samples)
        if key not in self._least:
            pairs = [(self.classes(split, halo), self._prices_of(split, halo, samples))]
            pairs.append((self.classes(_WHOLE, "layer"), self._prices_of(_WHOLE, "layer", samples)))
            each = [(forward + backward)[found.of] for found, (forward, backward) in pairs]
            self._least[key] = float(np.minimum(*each).sum())
        return self._least[key]

    def classes(self, split: Split, halo: str) -> Classes:
        """Return the classes of layers under a split."""
        if (split, halo) not in self._classes:
            self._classes[split, halo] = self.sorter.sort(split, halo)
        return self._classes[split, halo]

    def totals(self, split: Split, halo: str) -> tuple[float, float]:
        """Return the bytes of all layers on one rank: saved for the whole mini-batch, and trained."""
        found = self.classes(split, halo)
        if (split, halo) not in self._whole:
            saved = np.array([c.saved for c in found.classes])
            trained = np.array([c.trained for c in found.classes])
            self._whole[split, halo] = (float(found.counts @ saved), float(found.counts @ trained))
        return self._whole[split, halo]

    def _prices_of(self, split: Split, halo: str, samples: int) -> tuple[Floats, Floats]:
        key = (split, halo, samples)
        if key not in self._prices:
            self._prices[key] = self._price(self.classes(split, halo), samples)
        return self._prices[key]

    def _statistics_of(self, split: Split, halo: str, replicas: int) -> tuple[Floats, Floats]:
        key = (split, halo, replicas)
        if key not in self._statistics:
            self._statistics[key] = self._reduce(self.classes(split, halo), replicas)
        return self._statistics[key]

    def _table(self, split: Split, halo: str, samples: int, replicas: int) -> Table:
        sorted_ = self.classes(split, halo)
        forward, backward = self._prices_of(split, halo, samples)
        there, back = self._statistics_of(split, halo, replicas)
        share = samples / self.batch
        saved, weights, trained, parcels, largest = self._bytes(split, halo)
        ahead, behind = self._sums(sorted_, forward + there), self._sums(sorted_, backward + back)
        return Table(ahead, behind, saved * share, weights, trained, parcels * share, largest * share)

    def _bytes(self, split: Split, halo: str) -> tuple[Floats, Floats, Floats, Floats, float]:
        """Return the sums of bytes for the whole mini-batch."""
        if (split, halo) not in self._sizes:
            sorted_ = self.classes(split, halo)
            classes = sorted_.classes
            # Of parcels: what arrives and about as much that leaves, in both directions.
            parcels = [4 * sum(m.nbytes for m in c.moves if not m.reduces) for c in classes]
            columns = ([c.saved for c in classes], [c.weights for c in classes], [c.trained for c in classes])
            saved, weights, trained = (self._sums(sorted_, np.array(column)) for column in columns)
            largest = max(c.made for c in classes)
            self._sizes[split, halo] = (
                saved, weights, trained, self._sums(sorted_, np.array(parcels)), largest
            )  # fmt: skip
        return self._sizes[split, halo]

    def _sums(self, sorted_: Classes, values: Floats) -> Floats:
        each = np.bincount(self.sorter.positions, values[sorted_.of], self.length)
        return np.concatenate(([0.0], np.cumsum(each)))

    def _price(self, sorted_: Classes, samples: int) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of every class without shared statistics."""
        share = samples / self.batch
        moving = np.array([self._moves(c, sorted_.split, share) for c in sorted_.classes])
        back = np.where([c.grad for c in sorted_.classes], moving, 0.0)
        if isinstance(self.kernels, Roofline):
            if id(sorted_) not in self._many:
                self._many[id(sorted_)] = ManyRooflines(self.kernels, sorted_.classes)
            forward, backward = self._many[id(sorted_)].seconds(share)
        else:
            pairs = [self._compute(c, samples) for c in sorted_.classes]
            forward, backward = np.array([f for f, _ in pairs]), np.array([b for _, b in pairs])
        return forward + moving, backward + back

    def _compute(self, c: LayerClass, samples: int) -> tuple[float, float]:
        task = _resized(c.task, samples, self.batch)
        shapes = tuple(box.shape for box in task.wants)
        key = (c.kind, shapes, task.out.shape, task.shared, c.grad, c.input_grad)
        if key not in self._kernel:
            ask, layer = self.kernels.seconds, task.layer
            forward = ask(task, Direction.FORWARD).seconds if layer.operands else 0.0
            backward = 0.0
            weighted = layer.kind in WEIGHTED
            if c.grad and (c.input_grad or (c.trained and not weighted)):
                backward += ask(task, Direction.BACKWARD_INPUT).seconds
            if c.grad and c.trained and weighted:
                backward += ask(task, Direction.BACKWARD_WEIGHT).seconds
            self._kernel[key] = (forward, backward)
        return self._kernel[key]

    def _moves(self, c: LayerClass, split: Split, share: float) -> float:
        if not c.moves:
            return 0.0
        tier, seconds = self._tier(split), 0.0
        for move in c.moves:
            nbytes = move.nbytes * share
            if move.reduces:
                seconds += tier.collective_seconds("all_reduce", split.width, nbytes)
            else:
                seconds += move.peers * tier.exchange_seconds(nbytes / move.peers)
            seconds += 4 * nbytes / self.machine.device.memory_bandwidth
        return seconds

    def _tier(self, split: Split) -> Tier:
        return self.machine.tier((0, split.width - 1))

    def _reduce(self, sorted_: Classes, replicas: int) -> tuple[Floats, Floats]:
        """Return the seconds of the sums of shared statistics, forwards and backwards, of every class."""
        width = sorted_.split.width
        there, back = np.zeros(len(sorted_.classes)), np.zeros(len(sorted_.classes))
        for i, c in enumerate(sorted_.classes):
            ranks = replicas * (width if c.task.shared else 1)
            if c.channels and ranks > 1:
                tier = self.machine.tier((0, width * replicas - 1))
                there[i] = tier.collective_seconds("all_reduce", ranks, 24 * c.channels)
                back[i] = tier.collective_seconds("all_reduce", ranks, 16 * c.channels)
        return there, back


def _resized(task: Task, samples: int, batch: int) -> Task:
    """Return a task for another number of samples: the first dimension of every value."""
    if samples == batch:
        return task

    def resize(box: Box, values: bool) -> Box:
        if values and box.ndim and box.lo[0] == 0 and box.hi[0] == batch:
            return box.replace(0, (0, samples))
        return box

    operands = task.layer.operands
    held = tuple(resize(b, o.origin is Source.VALUE) for b, o in zip(task.held, operands, strict=True))
    return Task(task.layer, held, held, resize(task.out, True), task.shared)
