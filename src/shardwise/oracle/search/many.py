"""Ask a roofline for many layers at once, for any share of the mini-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.graph import Kind
from shardwise.machine import Curve
from shardwise.oracle.kernels import WEIGHTED, Direction, Roofline
from shardwise.oracle.search.classes import LayerClass

Floats = NDArray[np.float64]


class ManyRooflines:
    """The operations and bytes of some classes of layers, as arrays; same answers as one by one."""

    def __init__(self, roofline: Roofline, classes: Sequence[LayerClass]) -> None:
        self.device = roofline.device
        self.passes = np.array(
            [3 if c.task.shared else 2 if c.task.layer.kind is Kind.NORMALISATION else 1 for c in classes]
        )
        self.columns = {direction: _Column(roofline, classes, direction) for direction in Direction}

    def seconds(self, share: float) -> tuple[Floats, Floats]:
        """Return forward and backward seconds of every class for a share of the samples."""
        columns = {d: column.seconds(share, self.passes) for d, column in self.columns.items()}
        backward = columns[Direction.BACKWARD_INPUT] + columns[Direction.BACKWARD_WEIGHT]
        return columns[Direction.FORWARD], backward


class _Column:
    def __init__(self, roofline: Roofline, classes: Sequence[LayerClass], direction: Direction) -> None:
        device = roofline.device
        self.bandwidth = device.memory_bandwidth
        forward = direction is Direction.FORWARD
        self.overhead = device.overhead_forward_seconds if forward else device.overhead_backward_seconds
        self.wanted = np.array([_wanted(c, direction) for c in classes])
        self.flops = np.array([c.task.flops(direction) for c in classes])
        moved = np.array([c.task.nbytes(direction) for c in classes])
        self.stored = np.where(moved > 0, np.array([_stored(c) for c in classes]), 0.0)
        self.values = moved - self.stored
        self.wanted &= moved > 0
        self.peak = np.array([device.peak(c.task.layer.outputs[0].dtype) for c in classes])
        self.curves: list[tuple[Curve, NDArray[np.bool_]]] = []
        names = [(f"{c.task.layer.kind}/{direction}", str(c.task.layer.kind)) for c in classes]
        found = [device.efficiency.get(a) or device.efficiency.get(b) for a, b in names]
        for curve in {id(c): c for c in found if c is not None}.values():
            self.curves.append((curve, np.array([other is curve for other in found])))

    def seconds(self, share: float, passes: NDArray[np.int_]) -> Floats:
        flops = self.flops * share
        result: Floats = passes * (self.values * share + self.stored) / self.bandwidth
        for curve, mask in self.curves:
            mine = mask & (flops > 0)
            x, y = (np.array(column) for column in zip(*curve.points, strict=True))
            efficiency = np.interp(np.log(flops[mine]), np.log(x), y)
            result[mine] = np.maximum(result[mine], flops[mine] / (self.peak[mine] * efficiency))
        return np.where(self.wanted, result + self.overhead, 0.0)


def _wanted(c: LayerClass, direction: Direction) -> bool:
    weighted = c.task.layer.kind in WEIGHTED
    if not c.task.layer.operands or c.task.out.empty:
        return False
    if direction is Direction.FORWARD:
        return True
    if direction is Direction.BACKWARD_INPUT:
        return c.grad and (c.input_grad or bool(c.trained and not weighted))
    return c.grad and bool(c.trained) and weighted


def _stored(c: LayerClass) -> float:
    operands = c.task.layer.operands
    return float(sum(c.task.wants[i].size * operands[i].spec.itemsize for i in c.task.parameter_positions))
