"""Seconds and bytes of every layer under a split, for any number of samples, as running sums."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.geometry import Box
from shardwise.graph import Source, TensorSpec
from shardwise.machine import Machine
from shardwise.oracle.kernels import WEIGHTED, Direction, KernelTimes, Roofline, Task
from shardwise.oracle.search.classes import Sorter
from shardwise.oracle.search.many import rooflines
from shardwise.oracle.search.parts import LayerClass
from shardwise.plan import Split

Floats = NDArray[np.float64]
_MOST_SUMS = 144


class Sums:
    """Running sums over the layers of the graph: entry i counts the layers before i.

    The first three have a row for each number of samples: seconds of one micro-batch, communication inside
    the group included; `weight` is the part of `backward` that only makes gradients of weights. The others
    are bytes of one rank: `saved` (kept for backward) for one sample, and `parcels` (buffers of exchanges),
    which is no sum: all exchanges of a stage use the same memory. Each is worked out when it is asked for:
    whoever asks for bytes needs no prices.
    """

    def __init__(self, family: Family) -> None:
        self._family, self._running, self._of = family, family.tables.running, family.classes.of

    @cached_property
    def forward(self) -> Floats:
        """Return the seconds of forward passes."""
        return self._running(self._family.forward[:, self._of])

    @cached_property
    def backward(self) -> Floats:
        """Return the seconds of backward passes."""
        return self._running(self._family.backward[:, self._of])

    @cached_property
    def weight(self) -> Floats:
        """Return the seconds of backward passes that only make gradients of weights."""
        return self._running(self._family.weight[:, self._of])

    @cached_property
    def computing(self) -> Floats:
        """Return the seconds of both ways without exchanges."""
        return self._running(self._family.computing[:, self._of])

    @cached_property
    def saved(self) -> Floats:
        """Return what is kept of one sample."""
        return self._running(self._family.bytes_each[0])

    @cached_property
    def weights(self) -> Floats:
        """Return the bytes of weights and buffers."""
        return self._running(self._family.bytes_each[1])

    @cached_property
    def trained(self) -> Floats:
        """Return the bytes of weights that are trained."""
        return self._running(self._family.bytes_each[2])

    @cached_property
    def parcels(self) -> Floats:
        """Return the buffers of every layer for one sample: what arrives, and about as much that leaves."""
        family = self._family
        each = [
            max((2 * m.nbytes for m in c.moves if not m.reduces), default=0) for c in family.classes.classes
        ]
        found: Floats = np.array(each)[self._of] / family.tables.batch
        return found


class Family:
    """All plans that split stages in one way: what the classes of layers cost.

    Args:
        tables: of the network and the machine.
        split, halo: how stages are split.
        samples: of all micro-batches that are asked for.
        replicas: all numbers of replicas that are asked for.
        tail: what happens behind the last tile.
    """

    def __init__(
        self,
        tables: Tables,
        split: Split,
        halo: str,
        samples: Sequence[int],
        replicas: Sequence[int],
        tail: str = "auto",
    ) -> None:
        self.tables, self.split, self.halo = tables, split, halo
        self.samples = {n: i for i, n in enumerate(sorted(set(samples)))}
        self.replicas = {n: i for i, n in enumerate(sorted(set(replicas)))}
        self.shares: Floats = np.array(list(self.samples), dtype=np.float64) / tables.batch
        self.classes = tables.sorter.sort(split, halo, tail)
        self.largest = max(c.made for c in self.classes.classes) / tables.batch

    def column(self, name: str) -> Floats:
        """Return a number of bytes of every class."""
        return np.array([getattr(c, name) for c in self.classes.classes], dtype=np.float64)

    @cached_property
    def totals(self) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of all layers: of micro-batches, their weights' part, shared statistics."""
        counts = self.classes.counts
        both = (self.forward + self.backward) @ counts
        return both, self.weight @ counts, (self.there + self.back) @ counts

    @cached_property
    def running_statistics(self) -> Floats:
        """Return running sums of shared statistics both ways, with a row for each number of replicas."""
        return self.tables.running((self.there + self.back)[:, self.classes.of])

    @cached_property
    def bytes_each(self) -> tuple[Floats, Floats, Floats]:
        """Return the bytes of every layer: saved of one sample, of weights, and trained."""
        of, batch = self.classes.of, self.tables.batch
        return self.column("saved")[of] / batch, self.column("weights")[of], self.column("trained")[of]

    @property
    def sums(self) -> Sums:
        """Return the running sums; those that were asked for last are kept."""
        return self.tables.sums_of(self)

    def statistics(self, replicas: int) -> tuple[Floats, Floats]:
        """Return running sums of the seconds of shared statistics, forwards and backwards."""
        row = self.replicas[replicas]
        running = self.tables.running
        return running(self.there[row][self.classes.of]), running(self.back[row][self.classes.of])

    @property
    def forward(self) -> Floats:
        """Return the seconds of every class forwards, a row for each number of samples."""
        return self._prices[0]

    @property
    def backward(self) -> Floats:
        """Return the same backwards."""
        return self._prices[1]

    @property
    def weight(self) -> Floats:
        """Return the part of backward that only makes gradients of weights."""
        return self._prices[2]

    @property
    def computing(self) -> Floats:
        """Return the seconds of every class both ways without exchanges."""
        return self._prices[3]

    @property
    def there(self) -> Floats:
        """Return the seconds of shared statistics forwards, a row for each number of replicas."""
        return self._statistics[0]

    @property
    def back(self) -> Floats:
        """Return the same backwards."""
        return self._statistics[1]

    @cached_property
    def _prices(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the seconds of every class without shared statistics, a row for each number of samples."""
        classes, kernels = self.classes.classes, self.tables.kernels
        if isinstance(kernels, Roofline):
            forward, value, weight = rooflines(kernels, classes, self.shares)
        else:
            found = [[self.tables.compute(c, n) for c in classes] for n in self.samples]
            forward, value, weight = np.moveaxis(np.array(found, dtype=np.float64), 2, 0)
        moving = self._moving()
        grads = np.array([c.grad for c in classes])
        computing = forward + value + weight
        return forward + moving, value + weight + moving * grads, weight, computing

    def _moving(self) -> Floats:
        """Return the seconds of all exchanges in front of every class."""
        machine, width = self.tables.machine, self.split.width
        result = np.zeros((len(self.shares), len(self.classes.classes)))
        tier = machine.tier((0, width - 1))
        known: dict[tuple[float, int, bool], Floats] = {}
        for i, c in enumerate(self.classes.classes):
            for move in c.moves:
                key = (move.nbytes, move.peers, move.reduces)
                if key not in known:
                    sizes = (self.shares * move.nbytes).tolist()
                    if move.reduces:
                        times = [tier.collective_seconds("all_reduce", width, size) for size in sizes]
                    else:
                        peers = move.peers
                        times = [peers * tier.exchange_seconds(size / peers) for size in sizes]
                    copies = 4 * move.nbytes * self.shares / machine.device.memory_bandwidth
                    known[key] = np.array(times) + copies
                result[:, i] += known[key]
        return result

    @cached_property
    def _statistics(self) -> tuple[Floats, Floats]:
        """Return the seconds of the sums of shared statistics, a row for each number of replicas."""
        classes, width = self.classes.classes, self.split.width
        there = np.zeros((len(self.replicas), len(classes)))
        back = np.zeros_like(there)
        norms = [(i, c.channels, c.task.shared) for i, c in enumerate(classes) if c.channels]
        kinds = {(channels, shared) for _, channels, shared in norms}
        for row, replicas in enumerate(self.replicas):
            tier = self.tables.machine.tier((0, width * replicas - 1))
            known = {}
            for channels, shared in kinds:
                ranks = replicas * (width if shared else 1)
                ask = tier.collective_seconds
                known[channels, shared] = (
                    ask("all_reduce", ranks, 24 * channels),
                    ask("all_reduce", ranks, 16 * channels),
                )
            for i, channels, shared in norms:
                there[row, i], back[row, i] = known[channels, shared]
        return there, back


class Tables:
    """What all families of one network on one machine share."""

    def __init__(self, sorter: Sorter, machine: Machine, kernels: KernelTimes) -> None:
        self.sorter, self.machine, self.kernels = sorter, machine, kernels
        self.batch = sorter.graph.batch
        self.input_bytes = sum(layer.spec.nbytes for layer in sorter.graph.inputs)
        # Layers that a loss is made of share one place in the graph.
        self._order = np.argsort(sorter.positions, kind="stable")
        places = sorter.positions[self._order]
        self._ends = np.searchsorted(places, np.arange(len(sorter.graph.layers) + 1))
        self._sums: OrderedDict[int, Sums] = OrderedDict()
        self._kernel: dict[tuple[object, ...], tuple[float, float, float]] = {}

    def running(self, values: Floats) -> Floats:
        """Return running sums over the layers of the graph, beginning with 0."""
        sums = np.cumsum(values[..., self._order], axis=-1)
        start = np.zeros((*sums.shape[:-1], 1))
        return np.concatenate((start, sums), axis=-1)[..., self._ends]

    def largest(self, values: Floats, cuts: NDArray[np.int_]) -> Floats:
        """Return the largest value of the layers between neighbouring cuts."""
        at = self._ends[cuts]
        found: Floats = np.maximum.reduceat(np.append(values[self._order], 0.0), at[:-1])
        return np.where(np.diff(at) > 0, found, 0.0)

    def sums_of(self, family: Family) -> Sums:
        """Return the running sums of a family."""
        key = id(family)
        if key not in self._sums:
            self._sums[key] = Sums(family)
        self._sums.move_to_end(key)
        if len(self._sums) > _MOST_SUMS:
            self._sums.popitem(last=False)
        return self._sums[key]

    def compute(self, c: LayerClass, samples: int) -> tuple[float, float, float]:
        """Return seconds forward, backward for values and backward for weights of one micro-batch."""
        if c.done:
            return 0.0, 0.0, 0.0
        task = _resized(c.task, samples, self.batch)
        shapes = tuple(box.shape for box in task.wants)
        key = (c.kind, shapes, task.out.shape, task.shared, c.grad, c.input_grad)
        if key not in self._kernel:
            ask, layer = self.kernels.seconds, task.layer
            weighted = layer.kind in WEIGHTED
            forward = ask(task, Direction.FORWARD).seconds if layer.operands else 0.0
            value = weight = 0.0
            if c.grad and (c.input_grad or (c.trained and not weighted)):
                value = ask(task, Direction.BACKWARD_INPUT).seconds
            if c.grad and c.trained and weighted:
                weight = ask(task, Direction.BACKWARD_WEIGHT).seconds
            self._kernel[key] = (forward, value, weight)
        return self._kernel[key]


def _resized(task: Task, samples: int, batch: int) -> Task:
    """Return a task for another number of samples: the first dimension of every value."""
    if samples == batch:
        return task

    def resize(box: Box, spec: TensorSpec) -> Box:
        if not box.ndim or spec.shape[0] != batch:
            return box
        # Ranks may share the samples out; the first ones have one more.
        count = -(-(box.hi[0] - box.lo[0]) * samples // batch)
        return box.replace(0, (0, count))

    held = tuple(
        resize(box, operand.spec) if operand.origin is Source.VALUE else box
        for box, operand in zip(task.held, task.layer.operands, strict=True)
    )
    out = resize(task.out, task.layer.outputs[0])
    return Task(task.layer, held, held, out, task.shared, rectifies=task.rectifies)
