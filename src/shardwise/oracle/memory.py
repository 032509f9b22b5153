"""Peak memory of a stage on each rank: what is stored, what autograd keeps, what is alive for a moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.graph import Source
from shardwise.oracle.kernels import Direction, KernelTimes, Task
from shardwise.program import Compute, Held, Normalise, Op, Regrid, StageProgram

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "messages", "buffers", "baseline")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one micro-batch of a stage needs on one rank, in bytes.

    Args:
        weights: bytes of parameters and buffers.
        trained: bytes of each trained parameter.
        kept: what lives from the end of forward to backward.
        leaving: values that leave the stage and that autograd does not keep anyway.
        arriving: values that come from outside.
        forward_peak: at the fullest moment of forward, arrivals included.
        first_backward: activations and gradients at the fullest moment of the first backward pass.
        later_backward: the same for a later one, which finds the gradients of earlier ones.
        parcels: packed parcels of the largest exchange, which stay allocated.
    """

    weights: int
    kept: int
    leaving: int
    arriving: int
    forward_peak: int
    first_backward: tuple[int, int]
    later_backward: tuple[int, int]
    parcels: int
    trained: Mapping[str, int] = field(default_factory=dict)


def footprint(
    program: StageProgram, rank: int, kernels: KernelTimes | None = None, host: bool = True
) -> Footprint:
    """Return what one micro-batch of a stage needs on one rank of its group.

    `kernels` know what room computations take beyond their results; passes over tensors are compiled on a
    `host` only.
    """
    weights, trained, stored = _stored(program, rank)
    walk = _Walk(program, rank, kernels, host)
    walk.forward()
    ahead = walk.activations_at_peak
    peaks = []
    for there in (False, True):
        walk.activations_at_peak = walk.gradients_at_peak = 0
        walk.backward(trained, there=there)
        peaks.append((walk.activations_at_peak, walk.gradients_at_peak))
    leaving = {h.slot: _bytes(h, rank) for h in program.departures.values() if h.slot not in walk.saved}
    arriving = sum(_bytes(h, rank) for h in program.arrivals.values())
    return Footprint(
        weights + stored,
        walk.kept,
        sum(leaving.values()),
        arriving,
        ahead,
        peaks[0],
        peaks[1],
        _buffers(program, rank),
        trained,
    )


def stage_memory(
    program: StageProgram,
    rank: int,
    *,
    optimizer_slots: float = 1.0,
    in_flight: int = 1,
    baseline_bytes: float = 0.0,
    reduced: bool = False,
) -> Mapping[str, float]:
    """Return the bytes of one rank at its fullest moment, by category.

    Args:
        program: the lowered stage.
        rank: position in the group.
        optimizer_slots: copies of the parameters that the optimizer keeps (momentum 1, Adam 2).
        in_flight: micro-batches whose activations are kept at once; gradients of earlier ones are there.
        baseline_bytes: what the process takes before the first tensor.
        reduced: whether gradients are summed with other ranks, which needs a flat copy of them.
    """
    weights, trainable, stored = _stored(program, rank)
    walk = _Walk(program, rank)
    walk.forward()
    walk.backward(trainable, there=in_flight > 1)
    travelling = sum(trainable.values()) if reduced else 0
    return {
        "weights": float(weights + stored),
        "gradients": float(walk.gradients_at_peak),
        "optimizer": optimizer_slots * sum(trainable.values()),
        "activations": float(walk.kept * (in_flight - 1) + walk.activations_at_peak),
        "messages": 0.0,
        "buffers": float(_buffers(program, rank) + travelling),
        "baseline": float(baseline_bytes),
    }


def _stored(program: StageProgram, rank: int) -> tuple[int, dict[str, int], int]:
    """Return the bytes of parameters, of each trainable one, and of buffers."""
    weights: dict[str, int] = {}
    trainable: dict[str, int] = {}
    buffers: dict[str, int] = {}
    for op in program.ops:
        if isinstance(op, Regrid):
            continue
        for operand, held in zip(op.layer.operands, op.reads, strict=True):
            if operand.origin is Source.PARAMETER:
                box = program.parameters[operand.source].box(rank)
                weights[operand.source] = box.size * operand.spec.itemsize
                if held.grad:
                    trainable[operand.source] = weights[operand.source]
            elif operand.origin is Source.BUFFER:
                box = program.buffers[operand.source].box(rank)
                buffers[operand.source] = box.size * operand.spec.itemsize
    return sum(weights.values()), trainable, sum(buffers.values())


class _Walk:
    """Go through a stage forwards and backwards and note the fullest moment."""

    def __init__(
        self, program: StageProgram, rank: int, kernels: KernelTimes | None = None, host: bool = True
    ) -> None:
        self.program, self.rank, self.host = program, rank, host
        self.room = [_room(op, rank, kernels) for op in program.ops]
        self.kept = self.activations_at_peak = self.gradients_at_peak = 0
        self.added: list[int] = []
        self.saved: set[str] = set()

    def _note(self, activations: int, gradients: int) -> None:
        if activations + gradients > self.activations_at_peak + self.gradients_at_peak:
            self.activations_at_peak, self.gradients_at_peak = activations, gradients

    def forward(self) -> None:
        """Add up what autograd keeps, and what is alive until its last reader."""
        program, rank = self.program, self.rank
        dying = _dying(program)
        regrids = [op for op in program.ops if isinstance(op, Regrid)]
        landing = {op.source.slot: op.makes for op in regrids if op.lands(rank)}
        saved = self.saved
        alive = {h.slot: _bytes(h, rank) for h in program.arrivals.values()}
        moment = sum(alive.values())
        for i, op in enumerate(program.ops):
            view = isinstance(op, Compute) and op.layer.alias
            self._note(int(self.kept + moment + self.room[i][0]), 0)
            if isinstance(op, Regrid) and op.lands(rank):
                alive[op.makes.slot] = alive.pop(op.source.slot, 0)
            else:
                alive[op.makes.slot] = 0 if view else _bytes(landing.get(op.makes.slot, op.makes), rank)
                moment += alive[op.makes.slot]
            amount, taken = _saves(op, rank, saved, self.host)
            if isinstance(op, Regrid) and op.source.slot in saved and op.widens(rank):
                # The widened tensor holds all that the tile held: what was saved of that moves there.
                amount, taken = _bytes(op.makes, rank) - _bytes(op.source, rank), [op.makes.slot]
                saved.add(op.makes.slot)
            # What autograd keeps is no longer counted as alive for a moment.
            moment -= sum(alive.pop(slot, 0) for slot in taken)
            self.kept += amount
            self.added.append(amount)
            self._note(self.kept + moment, 0)
            moment -= sum(alive.pop(slot, 0) for slot in dying.get(i, ()))

    def backward(self, trainable: Mapping[str, int], *, there: bool) -> None:
        """Let go of what was kept, and add the gradients of values and of parameters."""
        rank, remaining = self.rank, self.kept
        flowing = {h.slot: _bytes(h, rank) for h in self.program.departures.values()}
        moment = sum(flowing.values())
        stored = sum(trainable.values()) if there else 0
        waiting = {} if there else dict(trainable)
        for i, op in reversed(list(enumerate(self.program.ops))):
            amount = self.added[i]
            # What is added to gradients that are there already is made first.
            names = op.layer.parameters if there and isinstance(op, Compute) else ()
            fresh = sum(trainable.get(name, 0) for name in names)
            self._note(int(remaining + moment + max(self.room[i][1], fresh)), stored)
            for held in (op.makes, *_values(op)):
                if held.grad and held.slot not in flowing:
                    flowing[held.slot] = _bytes(held, rank)
                    moment += flowing[held.slot]
            if not isinstance(op, Regrid):
                stored += sum(waiting.pop(name, 0) for name in op.layer.parameters)
            self._note(remaining + moment, stored)
            moment -= flowing.pop(op.makes.slot, 0)
            remaining -= amount


def _room(op: Op, rank: int, kernels: KernelTimes | None) -> tuple[float, float]:
    """Return what an operation allocates at its fullest moment, forwards and backwards."""
    if kernels is None or isinstance(op, Regrid):
        return 0.0, 0.0
    task = Task.of(op, rank)
    if task.out.empty:
        return 0.0, 0.0
    back = kernels.room(task, Direction.BACKWARD_INPUT) if op.makes.grad else 0.0
    return kernels.room(task, Direction.FORWARD), back


def _dying(program: StageProgram) -> Mapping[int, list[str]]:
    """Return for each operation the slots that nobody reads after it."""
    last = {held.slot: -1 for held in program.arrivals.values()}
    for i, op in enumerate(program.ops):
        for held in _values(op):
            last[held.slot] = i
    for held in program.departures.values():
        last[held.slot] = len(program.ops)
    result: dict[int, list[str]] = {}
    for slot, i in last.items():
        result.setdefault(i, []).append(slot)
    return result


def _values(op: Op) -> tuple[Held, ...]:
    """Return the activations that an operation reads."""
    if isinstance(op, Regrid):
        return (op.source,)
    pairs = zip(op.layer.operands, op.reads, strict=True)
    return tuple(held for operand, held in pairs if operand.origin is Source.VALUE)


def _bytes(held: Held, rank: int) -> int:
    return held.stored(rank).size * held.spec.itemsize


def _saves(op: Op, rank: int, saved: set[str], host: bool) -> tuple[int, list[str]]:
    """Return the bytes that an operation newly keeps for backward, and the slots among them."""
    if isinstance(op, Regrid) or not op.makes.grad:
        return 0, []
    values = (*_values(op), op.makes)
    names = set(op.layer.saves)
    if isinstance(op, Normalise):
        # A norm that rectifies looks at its result again where passes are not compiled.
        names = {op.reads[0].value} if host or not op.rectifies else {op.reads[0].value, op.makes.value}
    fresh = {h.slot: _bytes(h, rank) for h in values if h.value in names and h.slot not in saved}
    saved.update(fresh)
    amount = sum(fresh.values())
    if isinstance(op, Compute):
        specs = {o.source: o.spec for o in op.layer.operands} | {op.layer.name: op.makes.spec}
        named = sum(specs[name].nbytes for name in names if name in specs)
        # What has no name of its own (indices of a pooling, masks) is cut as the output is.
        unnamed = max(0, op.layer.saved_bytes - named)
        amount += unnamed * op.makes.layout.box(rank).size // max(1, op.makes.spec.numel)
    return amount, list(fresh)


def _buffers(program: StageProgram, rank: int) -> int:
    """Return the bytes of the packed parcels of the largest exchange: all of them use the same memory."""
    return max(
        (
            sum(m.box.size for m in op.messages_of(rank) if m.source != m.target) * op.makes.spec.itemsize
            for op in program.ops
            if isinstance(op, Regrid) and not op.is_sum
        ),
        default=0,
    )
