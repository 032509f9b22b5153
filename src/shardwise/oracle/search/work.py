"""How long the ranks of a plan work at least: passes of a lowered stage, for other numbers of samples too.

Whatever a rank waits for, it goes through its own events one after another: computations, exchanges inside
its group, sums of statistics. One lowered step tells those of all plans that cut and split the network alike:
where every rank holds all samples of a micro-batch, a smaller one has the same boxes with fewer of them.
Where ranks share samples out, that part of a pass is left out for other numbers of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.geometry import Box
from shardwise.graph import Kind, Source
from shardwise.machine import Machine
from shardwise.oracle.kernels import WEIGHTED, Direction, KernelTimes, Task
from shardwise.oracle.profile import key_of
from shardwise.program import Compute, Normalise, Op, Regrid, StageProgram
from shardwise.program.losses import RATIO, TERMS
from shardwise.program.lowered import Lowered

Asked = tuple[Task, Direction]


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one micro-batch on one rank: forwards, backwards, and the weights' part of the latter."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0

    @property
    def both(self) -> float:
        """Return the seconds of both ways."""
        return self.forward + self.backward


class Passes:
    """What the ranks of a lowered step do in each of its passes, at least.

    Args:
        step: lowered; of all that are asked about it has the largest micro-batches.
        kernels: times of computations.
    """

    def __init__(self, step: Lowered, kernels: KernelTimes) -> None:
        self.step, self.kernels = step, kernels
        lo, hi = step.samples(0, 0)
        self.samples = hi - lo
        self.programs = [step.stage(s, 0, 0) for s in range(len(step.plan.stages))]
        self._asked: dict[tuple[int, int], list[tuple[Task, Direction, int]]] = {}
        self._computing: dict[tuple[int, int, int], tuple[Pass, Pass]] = {}
        self._talking: dict[tuple[object, ...], Pass] = {}

    def computing(self, stage: int, member: int, samples: int) -> tuple[Pass, Pass]:
        """Return all computations of one rank: on a busy node, and on one whose other cores are idle."""
        key = (stage, member, samples)
        if key not in self._computing:
            if (stage, member) not in self._asked:
                self._asked[stage, member] = _counted(_asked(self.programs[stage], member))
            busy, alone = dict.fromkeys(Direction, 0.0), dict.fromkeys(Direction, 0.0)
            for task, direction, count in self._asked[stage, member]:
                resized = _resized(task, self.samples, samples)
                if resized is not None:
                    estimate = self.kernels.seconds(resized, direction)
                    busy[direction] += count * estimate.seconds
                    alone[direction] += count * estimate.seconds / max(1.0, estimate.alone)
            self._computing[key] = _pass(busy), _pass(alone)
        return self._computing[key]

    def trained(self, stage: int, member: int) -> dict[str, float]:
        """Return the bytes of each parameter that one rank updates."""
        program, found = self.programs[stage], {}
        for op in program.ops:
            if not isinstance(op, Regrid):
                for operand, held in zip(op.layer.operands, op.reads, strict=True):
                    if held.grad and operand.source in program.parameters:
                        size = program.parameters[operand.source].box(member).size
                        found[operand.source] = float(size * operand.spec.itemsize)
        return found

    def talking(
        self, stage: int, member: int, samples: int, groups: tuple[tuple[int, ...], ...], machine: Machine
    ) -> Pass:
        """Return all exchanges of one rank, its sums of statistics, and the cost of going on after them.

        Args:
            stage, member: whose they are.
            samples: of the micro-batch.
            groups: the ranks of the world that share the stage, in each replica.
            machine: as these ranks see it.
        """
        key = (stage, member, samples, groups, machine.crowd)
        if key not in self._talking:
            self._talking[key] = self._talk(stage, member, samples, groups, machine)
        return self._talking[key]

    def _talk(
        self, stage: int, member: int, samples: int, groups: tuple[tuple[int, ...], ...], machine: Machine
    ) -> Pass:
        there = back = 0.0
        device = machine.device
        before: Op | None = None
        for op in self.programs[stage].ops:
            ahead = behind = 0.0
            if isinstance(op, Regrid):
                ahead = behind = self._regrid(op, member, samples, groups[0], machine)
            elif isinstance(op, Normalise) and op.layer.op not in (TERMS, RATIO):
                owned = op.owned.box(member)
                channels = owned.shape[1] if owned.ndim > 1 else owned.size
                everybody = op.over == "group"
                ranks = [r for group in groups for r in (group if everybody else group[member : member + 1])]
                ahead, behind = (_sum(machine, ranks, 8 * n * channels) for n in (3, 2))
            elif isinstance(op, Compute) and not isinstance(before, Compute):
                ahead = device.overhead_segment_forward_seconds
                behind = device.overhead_segment_backward_seconds
            there, back, before = there + ahead, back + behind * op.makes.grad, op
        return Pass(there, back)

    def _regrid(self, op: Regrid, member: int, samples: int, group: Sequence[int], machine: Machine) -> float:
        """Return the seconds of an exchange: one parcel for each peer, both ways at once."""
        spec = op.makes.spec
        if op.is_sum:
            whole = samples == self.samples or (spec.shape and spec.shape[0] == self.samples)
            return _sum(machine, group, spec.nbytes * samples / self.samples) if whole else 0.0
        traffic: dict[int, list[float]] = {}
        unknown = set()
        for m in op.messages_of(member):
            size = self.share(m.box, samples) * spec.itemsize
            if m.source != m.target:
                peer = m.target if m.source == member else m.source
                traffic.setdefault(peer, [0.0, 0.0])[m.target == member] += size
                if not size and m.box.size:
                    unknown.add(peer)
        seconds, mine = 0.0, group[member]
        for peer, (out, arriving) in traffic.items():
            if peer not in unknown and max(out, arriving) > 0:
                tier, larger = machine.tier((mine, group[peer])), max(out, arriving)
                both = out > 0 and arriving > 0
                seconds += machine.exchange_seconds(tier, larger) if both else tier.message_seconds(larger)
        return seconds

    def share(self, box: Box, samples: int) -> float:
        """Return how many elements a box of a value has with so many samples; 0 if that is not known."""
        if samples == self.samples:
            return box.size
        if not box.ndim or box.ranges[0] != (0, self.samples):
            return 0.0
        return box.size * samples / self.samples


def _sum(machine: Machine, ranks: Sequence[int], nbytes: float) -> float:
    return machine.sum_seconds(machine.tier(ranks), len(ranks), nbytes) if len(ranks) > 1 else 0.0


def _pass(seconds: dict[Direction, float]) -> Pass:
    weight = seconds[Direction.BACKWARD_WEIGHT]
    return Pass(seconds[Direction.FORWARD], seconds[Direction.BACKWARD_INPUT] + weight, weight)


def _asked(program: StageProgram, member: int) -> Iterator[Asked]:
    """Yield the computations of one rank: the same that are priced, but for losses.

    What a loss computes is little, and depends on whether its mini-batch is shared out.
    """
    for op in program.ops:
        if isinstance(op, Regrid) or op.layer.kind is Kind.LOSS or op.layer.op in (TERMS, RATIO):
            continue
        task = Task.of(op, member)
        yield task, Direction.FORWARD
        if op.makes.grad:
            for direction in _backward(op, task):
                yield task, direction


def _counted(asked: Iterable[Asked]) -> list[tuple[Task, Direction, int]]:
    """Return each computation once, with how many there are that run the same kernel on the same shapes."""
    found: dict[tuple[str, Direction], list[Task]] = {}
    for task, direction in asked:
        found.setdefault((key_of(task), direction), []).append(task)
    return [(tasks[0], direction, len(tasks)) for (_, direction), tasks in found.items()]


def _backward(op: Compute | Normalise, task: Task) -> list[Direction]:
    parameters = task.parameter_positions
    value = any(r.grad for i, r in enumerate(op.reads) if i not in parameters)
    weight = any(op.reads[i].grad for i in parameters)
    weighted = op.layer.kind in WEIGHTED
    wanted = [Direction.BACKWARD_INPUT] if value or (weight and not weighted) else []
    return [*wanted, Direction.BACKWARD_WEIGHT] if weight and weighted else wanted


def _resized(task: Task, before: int, after: int) -> Task | None:
    """Return a task for another number of samples; None where samples are shared out among ranks.

    Nor for layers whose settings name the samples: what was measured for others would not be found.
    """
    if before == after:
        return task
    if task.layer.kind is Kind.RESHAPE:
        return None
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
