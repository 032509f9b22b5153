"""Run the operations of a stage on one rank without messages, and take the time of each of them.

Every operation finds its operands as the last one left them: partly in cache, weights out of it, outputs
in memory that was just freed or never used. Each is differentiated on its own, so that it can be timed;
what such a call costs beyond its place in a longer graph is measured once and subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.graph import Source
from shardwise.oracle.kernels import WEIGHTED, Direction, Task
from shardwise.oracle.moves import SUM, Move, move_of, sum_of, update_of
from shardwise.oracle.profile import key_of
from shardwise.program import Compute, Normalise, Op, Regrid
from shardwise.runtime.calibrate.chains import Chain
from shardwise.runtime.calibrate.clock import now
from shardwise.runtime.calibrate.pace import Crowd, Pace
from shardwise.runtime.calibrate.values import SMALL, Weights, seed, stored
from shardwise.runtime.hollow import hollow
from shardwise.runtime.in_place import rectify
from shardwise.runtime.landing import bind_landing
from shardwise.runtime.memory import allocator_profile
from shardwise.runtime.order import FIRST, Order
from shardwise.runtime.regrid import Exchange, bind_regrid
from shardwise.runtime.rules import bind
from shardwise.runtime.shared_norm import bind_norm
from shardwise.runtime.wire import LoneWire, Parcel, Wires

Times = dict[tuple[str, str], list[float]]
FORWARD, BACKWARD = Direction.FORWARD.value, Direction.BACKWARD_INPUT.value
_MARK = "shardwise "


class _Hollow(LoneWire):
    """A wire whose messages never leave: what surrounds them is timed, they themselves are not."""

    def line(self, receives: Sequence[Parcel], sends: Sequence[Parcel], tag: int, what: str) -> Any:
        """Prepare nothing but readable arrivals."""
        for parcel in receives:
            parcel.buffer.fill_(SMALL)
        return super().line((), (), tag, what)


@dataclass(eq=False)
class _Item:
    """One bound operation and what its times are filed under."""

    op: Op
    key: str
    run: Callable[..., Any]
    back: Callable[..., Any] | None = None
    back_key: str = ""
    refused: bool = False


class Replay:
    """One rank's chain of operations, bound to tensors of its own."""

    def __init__(
        self,
        chain: Chain,
        overhead: float,
        pace: Pace | None = None,
        order: Order = FIRST,
        weights: Weights | None = None,
    ) -> None:
        self.chain, self.rank, self.overhead, self.order = chain, chain.rank, overhead, order
        self.pace: Pace | Crowd | None = pace
        # The seconds of all that was timed, and of the waits for other ranks between; each of these behind
        # what was done since the one before.
        self.worked = self.waited = self._met = 0.0
        self.meetings: list[tuple[float, float]] = []
        self.refused: dict[str, str] = {}
        self.tensors = stored(chain)
        order.settle(chain.ops, self.tensors, chain.program.width)
        self.weights = weights or Weights()
        self.weights.share(self.tensors)
        wire = _Hollow()
        wires = Wires(wire, wire, wire)
        self.rooms: dict[str, Exchange] = {}
        # Exchanges first: what lands in their results is made before.
        regrids = {i: self._regrid(op, wires) for i, op in enumerate(chain.ops) if isinstance(op, Regrid)}
        self.items = [
            regrids[i] if isinstance(op, Regrid) else self._item(i, op, wires)
            for i, op in enumerate(chain.ops)
        ]
        self.last: dict[str, int] = {}
        self.marks = False
        self.clock: Callable[[], float] = now

    def _regrid(self, op: Regrid, wires: Wires) -> _Item:
        rank, dtype = self.rank, getattr(torch, op.makes.spec.dtype)
        there, back = bind_regrid(
            op.source.layout, op.makes.layout, op.messages, rank, wires.group, dtype,
            torch.device("cpu"), 0, op.why, op.makes.stored(rank), order=self.order,
        )  # fmt: skip
        if op.lands(rank) and isinstance(there, Exchange):
            self.rooms[op.source.slot] = there
        keys = move_of(op, rank).key, move_of(op, rank, back=True).key
        return _Item(op, keys[0], there, back, keys[1])

    def _item(self, index: int, op: Compute | Normalise, wires: Wires) -> _Item:
        rank = self.rank
        key = key_of(Task.of(op, rank))
        if isinstance(op, Normalise):
            norm = bind_norm(op, rank, wires, self.tensors, self.rooms.get(op.makes.slot))
            return _Item(op, key, norm.forward, norm.backward, key)
        if op.makes.slot in self.rooms:
            return _Item(op, key, bind_landing(op, rank, self.rooms[op.makes.slot].reserve), None, key)
        return _Item(op, key, rectify if index in self.chain.overwrites else bind(op, rank), None, key)

    def prepare(self) -> None:
        """Go through the chain once, untimed; leave out what rejects made-up operands."""
        slots: dict[str, Tensor] = {}
        for item in self.items:
            try:
                self._forward(item, slots, {})
            except (RuntimeError, ValueError, TypeError, LookupError) as error:
                # Ranks still meet there: the others may not have refused it.
                item.refused = True
                self.refused[item.key] = f"{type(error).__name__}: {error}"
        good = [(i, item) for i, item in enumerate(self.items) if not item.refused]
        self.last = {slot: i for i, item in good for slot in _slots(item.op)}
        for held in self.chain.program.departures.values():
            self.last.pop(held.slot, None)
        del slots
        # Memory is where it will be only after what was given back has been taken again.
        for _ in range(2):
            self.round({})

    def round(self, times: Times) -> None:
        """Go through the chain forwards and backwards once."""
        for tensor in self.tensors.values():
            tensor.grad = None
        slots: dict[str, Tensor] = {}
        tape: list[Any] = []
        together = not self.chain.is_lone
        if together:
            # All ranks know the loss of a step before the next one begins.
            self._meet()
        for i, item in enumerate(self.items):
            self._meet(item)
            if item.refused:
                tape.append(None)
                continue
            with self._mark("F", item):
                tape.append(self._forward(item, slots, times))
            for slot in _slots(item.op):
                if self.last.get(slot) == i:
                    slots.pop(slot, None)
        grads: dict[str, Tensor] = {}
        del slots
        for item in reversed(self.items):
            self._meet(item)
            saved = tape.pop()
            if not item.refused:
                with self._mark("B", item):
                    self._backward(item, saved, grads, times)
            del saved
        if together:
            # And sums of gradients, if there are any, are complete when all ranks are behind it.
            self._meet()
        self._accumulate(times)
        self._update(times)

    def _operand(self, held: Any, operand: Any, slots: dict[str, Tensor]) -> Tensor:
        """Return what an operation reads: as it was made, or something alike."""
        if operand is not None and operand.origin is not Source.VALUE:
            return self.tensors[operand.source]
        shape = held.stored(self.rank).shape
        tensor = slots.get(held.slot)
        if tensor is None or tuple(tensor.shape) != tuple(shape):
            dtype = getattr(torch, held.spec.dtype)
            make = torch.randn if dtype.is_floating_point else torch.zeros
            tensor = self.order.arranged(make(shape, dtype=dtype))
            slots[held.slot] = tensor
        return tensor

    def _forward(self, item: _Item, slots: dict[str, Tensor], times: Times) -> Any:
        op = item.op
        if isinstance(op, Regrid):
            source = self._operand(op.source, None, slots)
            room = self.rooms.get(op.source.slot)
            if room is not None and room.room is None:
                # Its maker is not in this chain.
                source = room.reserve().copy_(source)
            start = self.clock()
            slots[op.makes.slot] = item.run(source)
            self._note(times, item.key, FORWARD, self.clock() - start)
            return None
        operands = [
            self._operand(held, operand, slots)
            for operand, held in zip(op.layer.operands, op.reads, strict=True)
        ]
        if isinstance(op, Normalise):
            start = self.clock()
            with torch.no_grad():
                slots[op.makes.slot], saved = item.run(operands[0])
            self._note(times, item.key, FORWARD, self.clock() - start)
            return saved
        local, leaves = self._enter(op, operands)
        start = self.clock()
        out = item.run(local)
        self._note(times, item.key, FORWARD, self.clock() - start)
        edge = torch.autograd.graph.get_gradient_edge(out) if out.requires_grad else None
        slots[op.makes.slot] = out.detach()
        return leaves, edge, tuple(out.shape), out.dtype

    def _enter(self, op: Compute, operands: list[Tensor]) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Let values enter the graph without being kept by it, as the runtime does.

        No view as there, because autograd refuses to overwrite views of what it differentiates for.
        """
        local, leaves = list(operands), {}
        for i, (operand, held) in enumerate(zip(op.layer.operands, op.reads, strict=True)):
            if operand.origin is Source.VALUE and held.grad and operands[i].is_floating_point():
                leaf = leaves[i] = operands[i].detach().requires_grad_()
                local[i] = torch.ops.aten._unsafe_view.default(leaf, leaf.shape)
                local[i].data = operands[i]
                leaf.data = hollow(operands[i])
        return local, leaves

    def _backward(self, item: _Item, saved: Any, grads: dict[str, Tensor], times: Times) -> None:
        op = item.op
        if not op.makes.grad:
            return
        grad = grads.pop(op.makes.slot, None)
        if isinstance(op, Regrid):
            assert item.back is not None
            grad = self._seed(op.makes.stored(self.rank).shape, op.makes.spec.dtype) if grad is None else grad
            start = self.clock()
            result = item.back(grad)
            self._note(times, item.back_key, FORWARD, self.clock() - start)
            self._add(grads, op.source.slot, result, times)
            return
        if isinstance(op, Normalise):
            assert item.back is not None
            grad = (
                self._seed(op.makes.layout.box(self.rank).shape, op.makes.spec.dtype)
                if grad is None
                else grad
            )
            start = self.clock()
            with torch.no_grad():
                result = item.back(saved, grad)
            self._note(times, item.key, BACKWARD, self.clock() - start)
            if tuple(result.shape) == op.reads[0].stored(self.rank).shape:
                self._add(grads, op.reads[0].slot, result, times)
            return
        leaves, edge, shape, dtype = saved
        if edge is None:
            return
        grad = self._seed(shape, dtype) if grad is None or tuple(grad.shape) != shape else grad
        start = self.clock()
        torch.autograd.backward([edge], [grad])
        self._note(times, item.key, BACKWARD, max(0.0, self.clock() - start - self.overhead))
        for i, leaf in leaves.items():
            if leaf.grad is not None:
                gradient, leaf.grad = leaf.grad, None
                if any(gradient.data_ptr() == other.data_ptr() for other in grads.values()):
                    gradient = gradient.clone()
                self._add(grads, op.reads[i].slot, gradient, times)

    def _seed(self, shape: Sequence[int], dtype: Any) -> Tensor:
        return self.order.arranged(seed(shape, dtype))

    def _meet(self, item: _Item | None = None) -> None:
        """Wait for the other ranks where the program does."""
        if self.pace is not None and not (item is not None and isinstance(item.op, Compute)):
            seconds = self.pace.meet()
            self.waited += seconds
            self.meetings.append((self.worked - self._met, seconds))
            self._met = self.worked

    def _note(self, times: Times, key: str, direction: str, seconds: float) -> None:
        self.worked += seconds
        times.setdefault((key, direction), []).append(seconds)

    def _add(self, grads: dict[str, Tensor], slot: str, grad: Tensor, times: Times) -> None:
        if slot not in grads or grads[slot].shape != grad.shape:
            grads[slot] = grad
            return
        start = self.clock()
        grads[slot].add_(grad)
        self._note(times, _sum_key(grad), FORWARD, self.clock() - start)

    def _accumulate(self, times: Times) -> None:
        """Add to the gradients of weights once more, as the second micro-batch does."""
        for tensor in self.tensors.values():
            if tensor.grad is not None:
                grad = torch.ones_like(tensor.grad)
                start = self.clock()
                tensor.grad.add_(grad)
                self._note(times, _sum_key(grad), FORWARD, self.clock() - start)

    def _update(self, times: Times) -> None:
        """Update the weights, which have been in no cache since they were used."""
        for tensor in self.tensors.values():
            if tensor.grad is None:
                continue
            move = update_of(tensor.shape, str(tensor.dtype).removeprefix("torch."), tensor.element_size())
            if move is not None:
                start = self.clock()
                self.weights.update(tensor)
                self._note(times, move.key, FORWARD, self.clock() - start)

    def other_sums(self, times: Times) -> None:
        """Time additions that a piece of a stage does not come to by itself."""
        for key, move in self.chain.keys().items():
            if isinstance(move, Move) and move.kind == SUM and (key, FORWARD) not in times:
                total, grad = (self._seed(move.shape, move.dtype) for _ in range(2))
                for _ in range(3):
                    start = self.clock()
                    total.add_(grad)
                    self._note(times, key, FORWARD, self.clock() - start)

    def room(self) -> dict[tuple[str, str], float]:
        """Return what each operation allocates at its fullest moment, from the events of the allocator."""
        self.marks = True
        with allocator_profile() as profile:
            self.round({})
        self.marks = False
        events = profile.profiler.kineto_results.events()
        moments = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        moments.sort(key=lambda moment: moment[0])
        spans = sorted(
            (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
            for e in events
            if e.name().startswith(_MARK)
        )
        result: dict[tuple[str, str], float] = {}
        at = 0
        for start, end, name in spans:
            while at < len(moments) and moments[at][0] < start:
                at += 1
            total = most = 0
            while at < len(moments) and moments[at][0] <= end:
                total += moments[at][1]
                most = max(most, total)
                at += 1
            item = self.items[int(name[len(_MARK) + 1 :])]
            place = (item.key, FORWARD if name[len(_MARK)] == "F" else BACKWARD)
            result[place] = max(result.get(place, 0.0), float(most))
        return result

    def _mark(self, letter: str, item: _Item) -> Any:
        if not self.marks:
            return nullcontext()
        return torch.profiler.record_function(f"{_MARK}{letter}{self.items.index(item)}")

    def weight_shares(self) -> dict[str, float]:
        """Return which part of the backward time of each weighted operation its weights take."""
        shares: dict[str, float] = {}
        for item in self.items:
            op = item.op
            if item.refused or not isinstance(op, Compute) or op.layer.kind not in WEIGHTED:
                continue
            if item.key in shares:
                continue
            pairs = list(zip(op.layer.operands, op.reads, strict=True))
            wanted = {operand.origin for operand, held in pairs if held.grad}
            if op.makes.grad and wanted:
                both = {Source.VALUE, Source.PARAMETER} <= wanted
                shares[item.key] = self._share(item) if both else float(Source.PARAMETER in wanted)
        return shares

    def _share(self, item: _Item) -> float:
        slots: dict[str, Tensor] = {}
        op = item.op
        assert isinstance(op, Compute)
        pairs = list(zip(op.layer.operands, op.reads, strict=True))
        operands = [self._operand(held, operand, slots) for operand, held in pairs]
        local, _ = self._enter(op, operands)
        out = item.run(local)
        grad = self._seed(out.shape, out.dtype)
        weights = [t for t in operands if isinstance(t, nn.Parameter) and t.requires_grad]
        inputs = [t for t in local if not isinstance(t, nn.Parameter) and t.requires_grad]

        def run(wanted: Sequence[Tensor]) -> float:
            torch.autograd.grad(out, wanted, grad, retain_graph=True, allow_unused=True)
            start = self.clock()
            torch.autograd.grad(out, wanted, grad, retain_graph=True, allow_unused=True)
            return self.clock() - start

        first, second = run(weights), run(inputs)
        return first / max(first + second, 1e-12)


def _slots(op: Op) -> list[str]:
    if isinstance(op, Regrid):
        return [op.source.slot]
    pairs = zip(op.layer.operands, op.reads, strict=True)
    return [held.slot for operand, held in pairs if operand.origin is Source.VALUE]


def _sum_key(grad: Tensor) -> str:
    return sum_of(grad.shape, str(grad.dtype).removeprefix("torch."), grad.element_size()).key
