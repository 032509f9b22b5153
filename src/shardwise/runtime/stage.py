"""Execute one stage: bind its operations to tensors once, then run them forwards and backwards.

Local autograd works inside a segment, the computations between two communications; what crosses a
communication is passed on by hand, so that the order of messages is the program's on every rank.

With overlap, a backward pass starts each communication before the weight gradient of the segment behind it:

    convolution: gradient of the input | norm or halo: start | convolution: weights | norm or halo: finish

so that messages travel, and ranks that are late catch up, while the weights are worked on. Forwards, where
asked for, the interior of a tile is convolved between the start and the finish of its halo.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwise.program import Compute, Regrid, StageProgram
from shardwise.runtime.communications import Exchanged, Normalised
from shardwise.runtime.flow import Flow, Slots, Step, Tape, add_gradient
from shardwise.runtime.grouping import (
    Group,
    grouped,
    last_uses,
    parameters_of,
    put_off,
    read_behind,
    reads_of,
)
from shardwise.runtime.interior import interior_of
from shardwise.runtime.order import FIRST, Order
from shardwise.runtime.overlap import Overlap
from shardwise.runtime.regrid import Exchange, Scratch
from shardwise.runtime.rules import Surroundings
from shardwise.runtime.segment import Segment
from shardwise.runtime.weights_later import Note, WeightsLater
from shardwise.runtime.wire import Wires

Ready = Callable[[str], None]


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
        overlap: Overlap | None = None,
        order: Order = FIRST,
    ) -> None:
        self.program, self.rank, self.device, self.order = program, rank, device, order
        self.surroundings = surroundings or Surroundings()
        self.steps: list[Step] = []
        self.frees: list[list[str]] = []
        groups = grouped(program.ops)
        self.moved = {group.source.slot for group in groups if isinstance(group, Regrid)}
        reads = [reads_of(group) for group in groups]
        outside = read_behind(groups, program)
        self.overlap = overlap or Overlap()
        self.scratch = _scratch(groups, rank, device)
        waits = put_off(groups) if self.overlap.backward and program.width > 1 else [None] * len(groups)
        exchanges = {
            i: self._exchange(group, tensors, wires, i, waits[i + 1 : i + 2])
            for i, group in enumerate(groups)
            if isinstance(group, Regrid)
        }
        rooms = {e.source: e.room for e in exchanges.values() if isinstance(e.room, Exchange)}
        changed = {group.makes.slot for group in groups if isinstance(group, Regrid)}
        for i, group in enumerate(groups):
            if isinstance(group, Regrid):
                step: Step = exchanges[i]
            elif isinstance(group, list):
                step = Segment(
                    group, rank, tensors, outside[i], self.moved, self.surroundings, waits[i], rooms, changed
                )
            else:
                step = Normalised(group, rank, wires, tensors, order, rooms.get(group.makes.slot))
            self.steps.append(step)
            self.frees.append(sorted(reads[i] - outside[i]))
        self.buffer_bytes = self.scratch.nbytes
        # Parameters whose gradients are complete behind the first and behind the second half of each step.
        self.ready: list[tuple[list[str], list[str]]] = []
        for ends, op in zip(last_uses(groups), waits, strict=True):
            second = set() if op is None else set(op.layer.parameters)
            self.ready.append(([n for n in ends if n not in second], [n for n in ends if n in second]))
        self._listener: Ready | None = None
        self._listen(groups, tensors)

    def _listen(self, groups: Sequence[Group], tensors: Mapping[str, Tensor]) -> None:
        """Learn inside a long segment that the gradient of a parameter is complete, not only at its end."""
        users = Counter(name for group in groups for name in parameters_of(group))
        for group, (names, _) in zip(groups, self.ready, strict=True):
            for name in names if isinstance(group, list) else ():
                tensor = tensors.get(name)
                if users[name] == 1 and tensor is not None and tensor.is_leaf and tensor.requires_grad:
                    hook = tensor.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
                    weakref.finalize(self, hook.remove)

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        # The parameter is the user's and outlives this stage, whose buffers it must not keep.
        stage = weakref.ref(self)

        def complete(_: Tensor) -> None:
            self = stage()
            if self is None:
                return
            if self._listener is not None:
                self._listener(name)
            if self.surroundings.between is not None:
                self.surroundings.between()

        return complete

    def _exchange(
        self,
        op: Regrid,
        tensors: Mapping[str, Tensor],
        wires: Wires,
        tag: int,
        behind: Sequence[Compute | None],
    ) -> Exchanged:
        """Bind a regrid, with the convolution behind it if that fills the wait."""
        interior = None
        if self.overlap.forward:
            readers = (reader for reader in behind if reader is not None)
            found = (interior_of(op, reader, self.rank, tensors, self.order) for reader in readers)
            interior = next(found, None)
        return Exchanged(op, self.rank, wires.group, self.device, tag, interior, self.scratch, self.order)

    def forward(
        self, arrivals: Slots, keep: bool = True, later: list[Note] | None = None
    ) -> tuple[Slots, Tape]:
        """Compute the stage; return its departures by value name and the tape for backward.

        Backward will leave the weights' parts to `later`, if given, instead of doing them.
        """
        flow = Flow(dict(arrivals), later=[] if later is None else later)
        slots, tape = flow.slots, Tape()
        with WeightsLater(flow.later) if later is not None else nullcontext():
            for step, frees in zip(self.steps, self.frees, strict=True):
                tape.saved.append(step.forward(flow, keep))
                for slot in frees:
                    slots.pop(slot, None)
        return {name: slots[held.slot] for name, held in self.program.departures.items()}, tape

    def backward(self, tape: Tape, grads: Slots, ready: Ready | None = None) -> Slots:
        """Run the list backwards from the gradients of the departures; return those of the arrivals.

        `ready` is told the name of each parameter as soon as its gradient is complete, perhaps twice.
        """
        flowing: Slots = {}
        for name, grad in grads.items():
            add_gradient(flowing, self.program.departures[name].slot, grad)
        self._listener = ready
        tell = ready if ready is not None else _nobody
        open_half: Callable[[], None] | None = None
        for step, (first, second) in zip(reversed(self.steps), reversed(self.ready), strict=True):
            before, open_half = open_half, _begin(step, tape.saved.pop(), flowing, second, tell)
            for name in first:
                tell(name)
            if before is not None:
                before()
            if step.communicates:
                open_half()
                open_half = None
            # The gradients that it worked on are not kept while the next step computes.
            before = None
        if open_half is not None:
            open_half()
        self._listener = None
        return {slot: grad for slot, grad in flowing.items() if slot in self.program.arrivals}


def _scratch(groups: Sequence[Group], rank: int, device: torch.device) -> Scratch:
    """Return memory for the largest of all exchanges: passes have one of them under way at a time."""
    regrids = [group for group in groups if isinstance(group, Regrid) and not group.is_sum]
    sizes = [Scratch.needs(op.messages_of(rank), op.makes.spec.itemsize) for op in regrids]
    return Scratch(max(sizes, default=0), device)


def _begin(step: Step, saved: Any, grads: Slots, names: Sequence[str], tell: Ready) -> Callable[[], None]:
    """Do the first half of a step's backward pass; return the second."""
    under_way = [step.begin(saved, grads)]

    def run() -> None:
        step.end(under_way.pop(), grads)
        for name in names:
            tell(name)

    return run


def _nobody(_: str) -> None:
    """Hear nothing."""
