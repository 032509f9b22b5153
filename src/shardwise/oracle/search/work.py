"""How long the ranks of a plan work at least: bounds of an event-by-event simulation.

Whatever a rank waits for, it goes through its own events one after another: a step takes at least as long as
the events of any one rank. Of these the computations are known without a price of messages, for any number of
samples (`Kernels`); a priced step has them all (`busy_seconds`). Where ranks share cores a step also takes at
least the work of all ranks of a node, divided by its cores.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from shardwise.geometry import Box
from shardwise.graph import Source
from shardwise.oracle.events import Speed
from shardwise.oracle.kernels import WEIGHTED, Direction, KernelTimes, Task
from shardwise.oracle.walk import Walk
from shardwise.plan.mesh import mesh_of
from shardwise.plan.micro_batches import Direction as Way
from shardwise.plan.micro_batches import direction_of
from shardwise.program import Compute, Normalise, Regrid, StageProgram
from shardwise.program.lowered import Lowered

_ROUNDING = 1 - 1e-9
Asked = tuple[Task, Direction]


class Kernels:
    """The computations of a lowered step, for other numbers of samples too."""

    def __init__(self, step: Lowered, kernels: KernelTimes) -> None:
        self.step, self.kernels, self.mesh = step, kernels, mesh_of(step.plan)
        lo, hi = step.samples(0, 0)
        self.samples = hi - lo
        self._asked: dict[tuple[int, int], list[Asked]] = {}
        self._seconds: dict[tuple[int, int, int], float] = {}

    def least_seconds(self, step: Lowered) -> float:
        """Return what a step with the same stages, but other micro-batches, takes at least."""
        parts = Counter[tuple[int, Way]]()
        for m in range(step.program.micro_batches):
            lo, hi = step.samples(0, m)
            parts[hi - lo, direction_of(step.plan, m)] += 1
        mesh = mesh_of(step.plan)
        busiest = 0.0
        for position in {p for s in range(mesh.stages) for p in mesh.member_positions(s)[:1]}:
            roles = {role.direction: role for role in mesh.roles(position)}
            seconds = sum(
                count * self.seconds(roles[way].stage, roles[way].member, samples)
                for (samples, way), count in parts.items()
                if way in roles
            )
            busiest = max(busiest, seconds)
        return busiest * _ROUNDING

    def seconds(self, stage: int, member: int, samples: int) -> float:
        """Return the seconds of all computations of one rank on one micro-batch."""
        key = (stage, member, samples)
        if key not in self._seconds:
            if (stage, member) not in self._asked:
                self._asked[stage, member] = _asked(self.step.stage(stage, 0, 0), member)
            total = 0.0
            for task, direction in self._asked[stage, member]:
                resized = _resized(task, self.samples, samples)
                if resized is not None:
                    estimate = self.kernels.seconds(resized, direction)
                    total += estimate.seconds / max(1.0, estimate.alone)
            self._seconds[key] = total
        return self._seconds[key]


def busy_seconds(walk: Walk, cores: int) -> float:
    """Return what a priced step takes at least.

    Args:
        walk: the priced step.
        cores: of the one node that all ranks share; 0: every rank has its own.
    """
    program, plan, mesh = walk.lowered.program, walk.lowered.plan, walk.mesh
    device = walk.machine.device
    each = [0.0] * mesh.positions
    for m in range(program.micro_batches):
        way = direction_of(plan, m)
        for stage in range(mesh.stages):
            price = walk.price(stage, 0, m)
            for member, position in enumerate(mesh.member_positions(stage, way)):
                each[position] += sum(e.seconds for e in price.ahead[member])
                each[position] += sum(e.seconds for s in price.segments[member] for e in s.events)
    each = [seconds + device.update_seconds(walk.trained(p).values()) for p, seconds in enumerate(each)]
    # A rank whose neighbours wait may be faster than on the busy node on which kernels are timed.
    paces = [walk.paces.get(walk.mesh.world_rank(0, p), Speed()) for p in range(mesh.positions)]
    each = [seconds / pace.alone for seconds, pace in zip(each, paces, strict=True)]
    # Replicas whose share is smaller by a sample work less than the first one.
    alike = walk.replicas if walk.lowered.batch % plan.data == 0 else 1
    shared = sum(each) * alike / cores if cores else 0.0
    return max(shared, *each) * _ROUNDING


def _asked(program: StageProgram, member: int) -> list[Asked]:
    """Return the computations of one rank: the same that are priced."""
    found: list[Asked] = []
    for op in program.ops:
        if isinstance(op, Regrid):
            continue
        task = Task.of(op, member)
        found.append((task, Direction.FORWARD))
        if op.makes.grad:
            found += [(task, direction) for direction in _backward(op, task)]
    return found


def _backward(op: Compute | Normalise, task: Task) -> list[Direction]:
    parameters = task.parameter_positions
    value = any(r.grad for i, r in enumerate(op.reads) if i not in parameters)
    weight = any(op.reads[i].grad for i in parameters)
    weighted = op.layer.kind in WEIGHTED
    wanted = [Direction.BACKWARD_INPUT] if value or (weight and not weighted) else []
    return [*wanted, Direction.BACKWARD_WEIGHT] if weight and weighted else wanted


def _resized(task: Task, before: int, after: int) -> Task | None:
    """Return a task for another number of samples; None where samples are shared out among ranks."""
    if before == after:
        return task
    operands = task.layer.operands
    values = [operand.origin is Source.VALUE for operand in operands]
    boxes = [b for b, v in zip(task.held, values, strict=True) if v]
    boxes += [b for b, v in zip(task.wants, values, strict=True) if v]
    boxes.append(task.out)
    if not all(box.ndim and box.ranges[0] == (0, before) for box in boxes):
        return None

    def resize(found: tuple[Box, ...]) -> tuple[Box, ...]:
        return tuple(b.replace(0, (0, after)) if v else b for b, v in zip(found, values, strict=True))

    out = task.out.replace(0, (0, after))
    return dataclasses.replace(task, held=resize(task.held), wants=resize(task.wants), out=out)
