"""Execute one stage: bind its operations to tensors once, then run them forwards and backwards.

Local autograd works inside a segment, the computations between two communications; what crosses a
communication is passed on by hand, so that the order of messages is the program's on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.program import Compute, Held, Normalise, Regrid, StageProgram
from shardwise.runtime.regrid import bind_regrid
from shardwise.runtime.rules import bind
from shardwise.runtime.shared_norm import SharedBatchNorm
from shardwise.runtime.wire import Wire

Slots = dict[str, Tensor]


@dataclass
class Tape:
    """What one forward pass of a stage leaves for its backward pass."""

    saved: list[Any] = field(default_factory=list)


class Step(Protocol):
    """One bound operation."""

    def forward(self, slots: Slots, keep: bool) -> Any:
        """Compute into the slots; return what backward needs."""

    def backward(self, saved: Any, grads: Slots) -> None:
        """Turn gradients of what was made into gradients of what was read."""


class _Segment:
    """Computations without communication, differentiated by local autograd."""

    def __init__(
        self, ops: Sequence[Compute], rank: int, tensors: Mapping[str, Tensor], outside: set[str]
    ) -> None:
        made = {op.makes.slot for op in ops}
        self.calls = []
        reads: dict[str, bool] = {}
        for op in ops:
            names = []
            for held in op.reads:
                names.append((held.slot, tensors.get(held.slot) if _is_stored(op, held) else None))
                if not _is_stored(op, held) and held.slot not in made:
                    reads[held.slot] = held.grad
            self.calls.append((bind(op, rank), names, op.makes.slot))
        self.reads = reads
        self.makes = [op.makes.slot for op in ops if op.makes.slot in outside]

    def forward(self, slots: Slots, keep: bool) -> Any:
        local: Slots = {}
        leaves: Slots = {}
        for slot, grad in self.reads.items():
            tensor = slots[slot]
            if keep and grad:
                tensor = leaves[slot] = tensor.detach().requires_grad_()
            local[slot] = tensor
        with torch.set_grad_enabled(keep):
            for run, names, makes in self.calls:
                local[makes] = run([t if t is not None else local[name] for name, t in names])
        outs = [local[slot] for slot in self.makes]
        for slot, out in zip(self.makes, outs, strict=True):
            slots[slot] = out.detach()
        return (leaves, outs) if keep else None

    def backward(self, saved: Any, grads: Slots) -> None:
        leaves, outs = saved
        pairs = [
            (out, grads.pop(slot))
            for slot, out in zip(self.makes, outs, strict=True)
            if slot in grads and out.requires_grad
        ]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
        for slot, leaf in leaves.items():
            if leaf.grad is not None:
                _add(grads, slot, leaf.grad)


class _Exchange:
    """A regrid forwards, its adjoint backwards."""

    def __init__(self, op: Regrid, rank: int, wire: Wire, device: torch.device, tag: int) -> None:
        dtype = getattr(torch, op.makes.spec.dtype)
        self.source, self.makes, self.grad = op.source.slot, op.makes.slot, op.makes.grad
        self.there, self.back = bind_regrid(
            op.source.layout, op.makes.layout, op.messages, rank, wire, dtype, device, tag, op.why
        )

    def forward(self, slots: Slots, keep: bool) -> Any:
        slots[self.makes] = self.there(slots[self.source])
        return None

    def backward(self, saved: Any, grads: Slots) -> None:
        if self.grad:
            _add(grads, self.source, self.back(grads.pop(self.makes, None)))


class _Norm:
    """A normalisation that communicates."""

    def __init__(self, op: Normalise, rank: int, wire: Wire, tensors: Mapping[str, Tensor]) -> None:
        self.norm = SharedBatchNorm(op, rank, wire, tensors)
        self.source, self.makes, self.grad = op.reads[0].slot, op.makes.slot, op.reads[0].grad
        self.crop = self.norm.crop
        self.shape = op.reads[0].layout.box(rank).shape

    def forward(self, slots: Slots, keep: bool) -> Any:
        with torch.no_grad():
            slots[self.makes], saved = self.norm.forward(slots[self.source])
        return saved if keep else None

    def backward(self, saved: Any, grads: Slots) -> None:
        dy = grads.pop(self.makes, None)
        with torch.no_grad():
            dx = self.norm.backward(saved, torch.zeros_like(saved.x) if dy is None else dy)
        if not self.grad:
            return
        if self.crop is not None:
            wide = dx.new_zeros(self.shape)
            wide[self.crop] = dx
            dx = wide
        _add(grads, self.source, dx)


@dataclass(frozen=True)
class Wires:
    """The wires of a stage: among its group, and those over which statistics are shared."""

    group: Wire
    group_and_replicas: Wire
    replicas: Wire


class BoundStage:
    """A stage program of one rank, bound to its parameters, buffers and wires."""

    def __init__(
        self,
        program: StageProgram,
        rank: int,
        tensors: Mapping[str, Tensor],
        wires: Wires,
        device: torch.device,
    ) -> None:
        self.program, self.rank, self.device = program, rank, device
        self.steps: list[Step] = []
        self.frees: list[list[str]] = []
        groups: list[list[Compute] | Regrid | Normalise] = []
        for op in program.ops:
            if not isinstance(op, Compute):
                groups.append(op)
            elif groups and isinstance(groups[-1], list):
                groups[-1].append(op)
            else:
                groups.append([op])
        reads = [_reads(group) for group in groups]
        leaving = {held.slot for held in program.departures.values()}
        later = set(leaving)
        outside: list[set[str]] = []
        for names in reversed(reads):
            outside.append(set(later))
            later |= names
        outside.reverse()
        for i, group in enumerate(groups):
            self.steps.append(self._step(group, tensors, wires, outside[i], i))
            self.frees.append(sorted(reads[i] - outside[i]))
        self.ready = _last_uses(groups)

    def _step(
        self,
        group: list[Compute] | Regrid | Normalise,
        tensors: Mapping[str, Tensor],
        wires: Wires,
        outside: set[str],
        tag: int,
    ) -> Step:
        if isinstance(group, list):
            return _Segment(group, self.rank, tensors, outside)
        if isinstance(group, Regrid):
            return _Exchange(group, self.rank, wires.group, self.device, tag)
        wire = wires.group_and_replicas if group.over == "group" else wires.replicas
        return _Norm(group, self.rank, wire, tensors)

    def forward(self, arrivals: Slots, keep: bool = True) -> tuple[Slots, Tape]:
        """Compute the stage; return its departures by value name and the tape for backward."""
        slots = dict(arrivals)
        tape = Tape()
        for step, frees in zip(self.steps, self.frees, strict=True):
            tape.saved.append(step.forward(slots, keep))
            for slot in frees:
                slots.pop(slot, None)
        return {name: slots[held.slot] for name, held in self.program.departures.items()}, tape

    def backward(self, tape: Tape, grads: Slots, ready: Callable[[str], None] | None = None) -> Slots:
        """Run the list backwards from the gradients of the departures; return those of the arrivals.

        `ready` is told the name of each parameter as soon as its gradient is complete.
        """
        flowing: Slots = {}
        for name, grad in grads.items():
            _add(flowing, self.program.departures[name].slot, grad)
        for step, names in zip(reversed(self.steps), reversed(self.ready), strict=True):
            step.backward(tape.saved.pop(), flowing)
            if ready is not None:
                for name in names:
                    ready(name)
        return {slot: grad for slot, grad in flowing.items() if slot in self.program.arrivals}


def _is_stored(op: Compute, held: Held) -> bool:
    return held.value in op.layer.parameters or held.value in op.layer.buffers


def _last_uses(groups: Sequence[list[Compute] | Regrid | Normalise]) -> list[list[str]]:
    """Return for each group the parameters that no earlier group reads: backward ends with them there."""
    seen: set[str] = set()
    result = []
    for group in groups:
        ops = group if isinstance(group, list) else [group] if isinstance(group, Normalise) else []
        fresh = dict.fromkeys(name for op in ops for name in op.layer.parameters if name not in seen)
        seen.update(fresh)
        result.append(list(fresh))
    return result


def _reads(group: list[Compute] | Regrid | Normalise) -> set[str]:
    if isinstance(group, Regrid):
        return {group.source.slot}
    if isinstance(group, Normalise):
        return {group.reads[0].slot}
    return {held.slot for op in group for held in op.reads if not _is_stored(op, held)}


def _add(grads: Slots, slot: str, grad: Tensor) -> None:
    if slot in grads:
        grads[slot] = grads[slot] + grad
    else:
        grads[slot] = grad
