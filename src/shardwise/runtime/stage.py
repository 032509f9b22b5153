"""Execute one stage: bind its operations to tensors once, then run them forwards and backwards.

Local autograd works inside a segment, the computations between two communications; what crosses a
communication is passed on by hand, so that the order of messages is the program's on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.program import Compute, Held, Normalise, Regrid, StageProgram
from shardwise.runtime.hollow import hollow
from shardwise.runtime.in_place import rectified_in_place, rectify
from shardwise.runtime.regrid import bind_regrid
from shardwise.runtime.rules import Surroundings, bind
from shardwise.runtime.shared_norm import bind_norm
from shardwise.runtime.wire import Wire, Wires

Slots = dict[str, Tensor]


@dataclass
class _Box:
    """A tensor that autograd saved; it may be moved to a larger buffer that holds the same values."""

    tensor: Tensor


@dataclass
class Flow:
    """The values of one forward pass, and what autograd saved of those that will be copied elsewhere."""

    slots: Slots
    saved: dict[str, list[_Box]] = field(default_factory=dict)


@dataclass
class Tape:
    """What one forward pass of a stage leaves for its backward pass."""

    saved: list[Any] = field(default_factory=list)


class Step(Protocol):
    """One bound operation."""

    def forward(self, flow: Flow, keep: bool) -> Any:
        """Compute into the slots; return what backward needs."""

    def backward(self, saved: Any, grads: Slots) -> None:
        """Turn gradients of what was made into gradients of what was read."""


class _Segment:
    """Computations without communication, differentiated by local autograd.

    Between the passes it keeps the graph but neither its inputs nor its outputs: an input enters through a
    view of a leaf whose own storage is dropped at once, an output is remembered by its edge in the graph.
    """

    def __init__(
        self,
        ops: Sequence[Compute],
        rank: int,
        tensors: Mapping[str, Tensor],
        outside: set[str],
        moved: set[str],
        surroundings: Surroundings,
    ) -> None:
        made = {op.makes.slot for op in ops}
        self.calls = []
        self.reads: dict[str, bool] = {}
        overwrites = rectified_in_place(ops, rank, outside)
        for i, op in enumerate(ops):
            names = []
            for held in op.reads:
                names.append((held.slot, tensors.get(held.slot) if _is_stored(op, held) else None))
                if not _is_stored(op, held) and held.slot not in made:
                    self.reads[held.slot] = held.grad
            run = rectify if i in overwrites else bind(op, rank, surroundings)
            self.calls.append((run, names, op.makes.slot))
        self.makes = [op.makes.slot for op in ops if op.makes.slot in outside]
        self.frees = _last_reads(
            [[n for n, t in names if t is None] for _, names, _ in self.calls], self.makes
        )
        self.moved = [slot for slot in self.makes if slot in moved]

    def forward(self, flow: Flow, keep: bool) -> Any:
        slots = flow.slots
        if not keep:
            local = {slot: slots[slot] for slot in self.reads}
            with torch.no_grad():
                self._run(local)
            slots.update((slot, local[slot]) for slot in self.makes)
            return None
        local, leaves = self._enter(slots)
        with torch.enable_grad():
            if self.moved:
                packed: list[_Box] = []
                with torch.autograd.graph.saved_tensors_hooks(_packer(packed), _unpack):
                    self._run(local)
                self._note(local, packed, flow)
            else:
                self._run(local)
        edges = []
        for slot in self.makes:
            out = local[slot]
            edges.append(torch.autograd.graph.get_gradient_edge(out) if out.requires_grad else None)
            slots[slot] = out.detach()
        return leaves, edges

    def _enter(self, slots: Slots) -> tuple[Slots, Slots]:
        local: Slots = {}
        leaves: Slots = {}
        for slot, grad in self.reads.items():
            tensor = slots[slot]
            if grad:
                leaf = leaves[slot] = tensor.detach().requires_grad_()
                with torch.enable_grad():
                    local[slot] = leaf.view_as(leaf)
                leaf.data = hollow(tensor)
            else:
                local[slot] = tensor
        return local, leaves

    def _run(self, local: Slots) -> None:
        for (run, names, makes), frees in zip(self.calls, self.frees, strict=True):
            local[makes] = run([t if t is not None else local[name] for name, t in names])
            # What autograd did not save is free for the next layer, as in a plain forward pass.
            for name in frees:
                del local[name]

    def _note(self, local: Slots, packed: Sequence[_Box], flow: Flow) -> None:
        """Find what autograd saved of the outputs that a regrid is about to copy."""
        for slot in self.moved:
            out = local[slot]
            place = (out.data_ptr(), out.shape)
            flow.saved[slot] = [box for box in packed if (box.tensor.data_ptr(), box.tensor.shape) == place]

    def backward(self, saved: Any, grads: Slots) -> None:
        leaves, edges = saved
        pairs = [
            (edge, grads.pop(slot))
            for slot, edge in zip(self.makes, edges, strict=True)
            if slot in grads and edge is not None
        ]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        seen: set[int] = set()
        for slot, leaf in leaves.items():
            if leaf.grad is not None:
                # A sum hands one gradient to both of its operands; they are added to separately.
                shared = leaf.grad.untyped_storage().data_ptr()
                _add(grads, slot, leaf.grad.clone() if shared in seen else leaf.grad)
                seen.add(shared)


def _packer(packed: list[_Box]) -> Callable[[Tensor], _Box]:
    def pack(tensor: Tensor) -> _Box:
        box = _Box(tensor)
        packed.append(box)
        return box

    return pack


def _unpack(box: _Box) -> Tensor:
    return box.tensor


class _Exchange:
    """A regrid forwards, its adjoint backwards."""

    def __init__(self, op: Regrid, rank: int, wire: Wire, device: torch.device, tag: int) -> None:
        dtype = getattr(torch, op.makes.spec.dtype)
        self.source, self.makes, self.grad = op.source.slot, op.makes.slot, op.makes.grad
        self.there, self.back = bind_regrid(
            op.source.layout,
            op.makes.layout,
            op.messages,
            rank,
            wire,
            dtype,
            device,
            tag,
            op.why,
            op.makes.stored(rank),
        )
        self.buffer_bytes = self.there.nbytes + self.back.nbytes
        held, wanted = op.source.layout.box(rank), op.makes.stored(rank)
        whole = not op.source.layout.partial and wanted.contains(held)
        self.inner = held.slices(wanted) if whole else None

    def forward(self, flow: Flow, keep: bool) -> Any:
        result = self.there(flow.slots[self.source])
        flow.slots[self.makes] = result
        if self.inner is not None:
            # The widened tensor holds all that the tile held: one copy is enough for backward.
            for box in flow.saved.pop(self.source, ()):
                box.tensor = result[self.inner]
        return None

    def backward(self, saved: Any, grads: Slots) -> None:
        if self.grad:
            _add(grads, self.source, self.back(grads.pop(self.makes, None)))


class _Norm:
    """A normalisation that communicates."""

    def __init__(self, op: Normalise, rank: int, wires: Wires, tensors: Mapping[str, Tensor]) -> None:
        self.norm = bind_norm(op, rank, wires, tensors)
        self.source, self.makes, self.grad = op.reads[0].slot, op.makes.slot, op.reads[0].grad
        self.crop = self.norm.crop
        self.shape = op.reads[0].layout.box(rank).shape

    def forward(self, flow: Flow, keep: bool) -> Any:
        with torch.no_grad():
            flow.slots[self.makes], saved = self.norm.forward(flow.slots[self.source])
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


class BoundStage:
    """A stage program of one rank, bound to its parameters, buffers and wires."""

    def __init__(
        self,
        program: StageProgram,
        rank: int,
        tensors: Mapping[str, Tensor],
        wires: Wires,
        device: torch.device,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.program, self.rank, self.device = program, rank, device
        self.surroundings = surroundings or Surroundings()
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
        self.moved = {group.source.slot for group in groups if isinstance(group, Regrid)}
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
        self.buffer_bytes = sum(step.buffer_bytes for step in self.steps if isinstance(step, _Exchange))
        self.ready = _last_uses(groups)
        self._listener: Callable[[str], None] | None = None
        self._listen(groups, tensors)

    def _listen(
        self, groups: Sequence[list[Compute] | Regrid | Normalise], tensors: Mapping[str, Tensor]
    ) -> None:
        """Learn inside a long segment that the gradient of a parameter is complete, not only at its end."""
        users = Counter(name for group in groups for name in _parameters(group))
        for group, names in zip(groups, self.ready, strict=True):
            for name in names if isinstance(group, list) else ():
                tensor = tensors.get(name)
                if users[name] == 1 and tensor is not None and tensor.is_leaf and tensor.requires_grad:
                    tensor.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def complete(_: Tensor) -> None:
            if self._listener is not None:
                self._listener(name)

        return complete

    def _step(
        self,
        group: list[Compute] | Regrid | Normalise,
        tensors: Mapping[str, Tensor],
        wires: Wires,
        outside: set[str],
        tag: int,
    ) -> Step:
        if isinstance(group, list):
            return _Segment(group, self.rank, tensors, outside, self.moved, self.surroundings)
        if isinstance(group, Regrid):
            return _Exchange(group, self.rank, wires.group, self.device, tag)
        return _Norm(group, self.rank, wires, tensors)

    def forward(self, arrivals: Slots, keep: bool = True) -> tuple[Slots, Tape]:
        """Compute the stage; return its departures by value name and the tape for backward."""
        flow = Flow(dict(arrivals))
        slots, tape = flow.slots, Tape()
        for step, frees in zip(self.steps, self.frees, strict=True):
            tape.saved.append(step.forward(flow, keep))
            for slot in frees:
                slots.pop(slot, None)
        return {name: slots[held.slot] for name, held in self.program.departures.items()}, tape

    def backward(self, tape: Tape, grads: Slots, ready: Callable[[str], None] | None = None) -> Slots:
        """Run the list backwards from the gradients of the departures; return those of the arrivals.

        `ready` is told the name of each parameter as soon as its gradient is complete, perhaps twice.
        """
        flowing: Slots = {}
        for name, grad in grads.items():
            _add(flowing, self.program.departures[name].slot, grad)
        self._listener = ready
        for step, names in zip(reversed(self.steps), reversed(self.ready), strict=True):
            step.backward(tape.saved.pop(), flowing)
            if ready is not None:
                for name in names:
                    ready(name)
        self._listener = None
        return {slot: grad for slot, grad in flowing.items() if slot in self.program.arrivals}


def _is_stored(op: Compute, held: Held) -> bool:
    return held.value in op.layer.parameters or held.value in op.layer.buffers


def _last_reads(reads: Sequence[Sequence[str]], kept: Sequence[str]) -> list[list[str]]:
    """Return for each call the slots that no later one reads and nobody wants outside."""
    seen = set(kept)
    result = []
    for names in reversed(reads):
        fresh = [name for name in dict.fromkeys(names) if name not in seen]
        seen.update(fresh)
        result.append(fresh)
    return result[::-1]


def _last_uses(groups: Sequence[list[Compute] | Regrid | Normalise]) -> list[list[str]]:
    """Return for each group the parameters that no earlier group reads: backward ends with them there."""
    seen: set[str] = set()
    result = []
    for group in groups:
        fresh = [name for name in _parameters(group) if name not in seen]
        seen.update(fresh)
        result.append(fresh)
    return result


def _parameters(group: list[Compute] | Regrid | Normalise) -> list[str]:
    """Return the parameters that a group reads, each once."""
    ops = group if isinstance(group, list) else [group] if isinstance(group, Normalise) else []
    return list(dict.fromkeys(name for op in ops for name in op.layer.parameters))


def _reads(group: list[Compute] | Regrid | Normalise) -> set[str]:
    if isinstance(group, Regrid):
        return {group.source.slot}
    if isinstance(group, Normalise):
        return {group.reads[0].slot}
    return {held.slot for op in group for held in op.reads if not _is_stored(op, held)}


def _add(grads: Slots, slot: str, grad: Tensor) -> None:
    """Add a gradient in place: every one that arrives here is a tensor of its own."""
    if slot in grads:
        grads[slot].add_(grad)
    else:
        grads[slot] = grad
