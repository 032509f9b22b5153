"""Ask a roofline for many layers at once, for many shares of the mini-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.graph import Kind
from shardwise.machine import Curve
from shardwise.oracle.kernels import WEIGHTED, Direction, Roofline
from shardwise.oracle.search.parts import LayerClass

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def rooflines(
    roofline: Roofline, classes: Sequence[LayerClass], shares: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return seconds forward, backward for values and backward for weights: a row for each share.

    The answers are those of the roofline asked one by one.
    """
    passes = np.array(
        [3 if c.task.shared else 2 if c.task.layer.kind is Kind.NORMALISATION else 1 for c in classes]
    )
    stored = np.array([_stored(c) for c in classes])
    columns = [_column(roofline, classes, direction, shares, passes, stored) for direction in Direction]
    return columns[0], columns[1], columns[2]


def _column(
    roofline: Roofline,
    classes: Sequence[LayerClass],
    direction: Direction,
    shares: Floats,
    passes: NDArray[np.int_],
    stored: Floats,
) -> Floats:
    device = roofline.device
    forward = direction is Direction.FORWARD
    overhead = device.overhead_forward_seconds if forward else device.overhead_backward_seconds
    wanted = [_wanted(c, direction) for c in classes]
    pairs = [
        (c.task.flops(direction), c.task.nbytes(direction)) if used else (0.0, 0.0)
        for c, used in zip(classes, wanted, strict=True)
    ]
    flops, moved = np.array(pairs).reshape(-1, 2).T
    kept = np.where(moved > 0, stored, 0.0)
    work = shares[:, None] * flops
    result: Floats = passes * (shares[:, None] * (moved - kept) + kept) / device.memory_bandwidth
    peak = np.array([device.peak(c.task.layer.outputs[0].dtype) for c in classes])
    for curve, mine in _curves(roofline, classes, direction, flops > 0):
        x, y = (np.array(column) for column in zip(*curve.points, strict=True))
        efficiency = np.interp(np.log(work[:, mine]), np.log(x), y)
        result[:, mine] = np.maximum(result[:, mine], work[:, mine] / (peak[mine] * efficiency))
    return np.where(moved > 0, result + overhead, 0.0)


def _curves(
    roofline: Roofline, classes: Sequence[LayerClass], direction: Direction, computes: Bools
) -> list[tuple[Curve, Bools]]:
    """Return the efficiency curves, each with the classes it is for."""
    kinds = {c.task.layer.kind for c in classes}
    curves = {kind: roofline.device.curve(kind, direction) for kind in kinds}
    found = [curves[c.task.layer.kind] for c in classes]
    distinct = {id(curve): curve for curve in found if curve is not None}
    return [(curve, computes & np.array([f is curve for f in found])) for curve in distinct.values()]


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
