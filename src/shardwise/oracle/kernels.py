"""Where the time of a computation comes from: a roofline over the machine's figures, or a profile."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from shardwise.geometry import Box
from shardwise.graph import Kind, Layer, Source
from shardwise.machine import Device
from shardwise.machine.curve import Points
from shardwise.oracle.moves import Move
from shardwise.program import Compute, Normalise

WEIGHTED = (Kind.CONVOLUTION, Kind.TRANSPOSED, Kind.LINEAR)


class Direction(StrEnum):
    """Which of the three computations of a layer."""

    FORWARD = "forward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A time, the half width of its interval, and a word if it was not measured for this very shape.

    The time is that on a busy node; `alone` is how much shorter it is while the other cores are idle, and
    `crowded` how much more of a core's time it takes where more ranks than cores take turns.
    """

    seconds: float
    spread: float = 0.0
    flag: str = ""
    alone: float = 1.0
    crowded: float = 1.0


@dataclass(frozen=True)
class Task:
    """One rank's computation of one layer: what it holds, what of it the layer reads, what it makes.

    `shared` marks a normalisation whose statistics are reduced over ranks, which runs another kernel,
    `landing` a computation that writes into the middle of a wider tensor, and `rectifies` a normalisation
    that rectifies what it makes.
    """

    layer: Layer
    held: tuple[Box, ...]
    wants: tuple[Box, ...]
    out: Box
    shared: bool = False
    landing: bool = False
    rectifies: bool = False

    @staticmethod
    def of(op: Compute | Normalise, rank: int) -> Task:
        """Return the task of one rank in a lowered operation."""
        return Task(
            op.layer,
            tuple(read.stored(rank) for read in op.reads),
            tuple(want.box(rank) for want in op.wants),
            op.makes.layout.box(rank),
            isinstance(op, Normalise),
            op.landing,
            isinstance(op, Normalise) and op.rectifies,
        )

    @cached_property
    def fraction(self) -> float:
        """Return which part of the layer's multiplications and additions this rank does."""
        whole = math.prod(self.layer.outputs[0].shape)
        part = self.out.size / whole if whole else 0.0
        for group in self.layer.contracts:
            position, dim = group[0]
            extent = self.layer.operands[position].spec.shape[dim]
            part *= self.wants[position].shape[dim] / extent if extent else 0.0
        return part

    @property
    def parameter_positions(self) -> tuple[int, ...]:
        """Return which operands are parameters."""
        operands = self.layer.operands
        return tuple(i for i, o in enumerate(operands) if o.origin is Source.PARAMETER)

    def flops(self, direction: Direction) -> float:
        """Return the operations of one direction; backward is halved between input and weight."""
        if direction is Direction.FORWARD:
            return self.layer.forward_flops * self.fraction
        if self.layer.kind in WEIGHTED:
            return self.layer.backward_flops * self.fraction / 2
        return self.layer.backward_flops * self.fraction if direction is Direction.BACKWARD_INPUT else 0.0

    @cached_property
    def _amounts(self) -> tuple[int, int, int]:
        """Return the bytes of the values and of the parameters that are read, and of what is made."""
        values = stored = 0
        for want, operand in zip(self.wants, self.layer.operands, strict=True):
            nbytes = want.size * operand.spec.itemsize
            if operand.origin is Source.PARAMETER:
                stored += nbytes
            else:
                values += nbytes
        return values, stored, self.out.size * self.layer.outputs[0].itemsize

    def nbytes(self, direction: Direction) -> float:
        """Return the bytes that one direction reads and writes at least once."""
        values, stored, out = self._amounts
        if direction is Direction.FORWARD:
            return values + stored + out
        if direction is Direction.BACKWARD_INPUT:
            # The gradient of the output and the saved value are read, the gradient of the input is written.
            return out + stored + values * (1 if self.layer.kind in WEIGHTED else 2)
        return out + values + stored if self.layer.kind in WEIGHTED else 0.0


class KernelTimes(Protocol):
    """Answer how long a computation takes on one rank."""

    def seconds(self, task: Task, direction: Direction) -> Estimate:
        """Return the time of one direction of a task."""

    def moving(self, move: Move) -> Estimate:
        """Return the time of copies and additions around communications."""

    def room(self, task: Task, direction: Direction) -> float:
        """Return the bytes that one direction allocates at its fullest moment, results included."""

    def lateness(self) -> Points:
        """Return by which part of what they did ranks with a core each are late, over its seconds."""

    def updates(self) -> tuple[Points, float]:
        """Return how long updates of parameters of some sizes take, and how much shorter each is alone."""

    def sums(self) -> dict[tuple[str, int], Points]:
        """Return how long sums of gradients of some sizes take, by transport and number of ranks."""

    def fields(self) -> Iterable[str]:
        """Return the machine's fields that the answers so far came from."""


# Below so many elements (of a volume: without its last dimension) one image is convolved without blocks,
# unless its filters are large or grouped.
_SMALL_IMAGE = 20480


def _blocked(task: Task) -> bool:
    """Tell whether torch hands a convolution on a processor to a library that works on blocks."""
    image, weight = task.wants[:2]
    if task.layer.outputs[0].dtype == "float64":
        return False
    grouped = weight.shape[1] < image.shape[1]
    large = min(weight.shape[-2:]) > 3
    return grouped or large or image.shape[0] > 1 or math.prod(image.shape[:4]) > _SMALL_IMAGE


class Roofline:
    """Compute times from the peak, the efficiency curves and the memory bandwidth of a device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._used: set[str] = set()

    def seconds(self, task: Task, direction: Direction) -> Estimate:
        """Return the larger of computing and moving, plus the software overhead of one operator."""
        device, layer = self.device, task.layer
        flops, moved = task.flops(direction), task.nbytes(direction)
        if task.out.empty or moved == 0:
            return Estimate(0.0)
        forward = direction is Direction.FORWARD
        overhead = device.overhead_forward_seconds if forward else device.overhead_backward_seconds
        passes = 3 if task.shared else 2 if layer.kind is Kind.NORMALISATION else 1
        moving = passes * moved / device.memory_bandwidth
        computing = 0.0
        curve = device.curve(layer.kind, direction)
        if curve is not None and flops:
            dtype = layer.outputs[0].dtype
            computing = flops / (device.peak(dtype) * curve.at(flops))
            self._used |= {f"device.peak_flops.{dtype}", "device.efficiency"}
        side = "forward" if forward else "backward"
        self._used |= {"device.memory_bandwidth", f"device.overhead_{side}_seconds"}
        seconds = max(computing, moving) + overhead
        if task.rectifies:
            # As a pass of its own, which it is on accelerators.
            touched = (2 if forward else 3) * task.out.size * layer.outputs[0].itemsize
            seconds += touched / device.memory_bandwidth + overhead
        return Estimate(seconds, flag="roofline", alone=device.alone_speedup)

    def balance(self, task: Task) -> float:
        """Return how many operations the device does while its memory moves one byte."""
        return self.device.peak(task.layer.outputs[0].dtype) / self.device.memory_bandwidth

    def moving(self, move: Move) -> Estimate:
        """Return how long the memory needs for the bytes."""
        self._used.add("device.memory_bandwidth")
        return Estimate(move.nbytes / self.device.memory_bandwidth, alone=self.device.alone_speedup)

    def room(self, task: Task, direction: Direction) -> float:
        """Return nothing beyond the results, except where processors reorder what a convolution reads.

        They bring both operands into blocks, compute a result in blocks and copy that out of them; or, where
        that is not worth it, write the operands of every output position side by side.
        """
        if not self.device.host or task.layer.kind not in (Kind.CONVOLUTION, Kind.TRANSPOSED):
            return 0.0
        operands = task.layer.operands
        x, w = (b.size * o.spec.itemsize for b, o in zip(task.wants[:2], operands[:2], strict=True))
        y = task.out.size * task.layer.outputs[0].itemsize
        if math.prod(task.wants[1].shape[2:]) == 1:
            return 0.0
        if task.layer.kind is Kind.CONVOLUTION and not _blocked(task):
            columns = y // max(1, task.out.shape[1]) * math.prod(task.wants[1].shape[1:])
            return float(y + columns if direction is Direction.FORWARD else x + columns + w)
        if direction is Direction.FORWARD:
            return float(max(x + w + y, 2 * y))
        return float(max(y + w + x, 2 * x, x + y + x + w, x + 2 * w))

    def lateness(self) -> Points:
        """Return nothing: figures of a device do not tell."""
        return ()

    def updates(self) -> tuple[Points, float]:
        """Return nothing: the device says so itself."""
        return (), 1.0

    def sums(self) -> dict[tuple[str, int], Points]:
        """Return nothing: the network says so itself."""
        return {}

    def fields(self) -> tuple[str, ...]:
        """Return the machine's fields that the answers so far came from."""
        return tuple(sorted(self._used))
