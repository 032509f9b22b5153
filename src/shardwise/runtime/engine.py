"""Execute the program of a step: one rank's actions, bound to tensors, wires and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.geometry import Box
from shardwise.graph import Kind
from shardwise.plan.micro_batches import Direction, direction_of
from shardwise.program.actions import Act, Action, Edge
from shardwise.program.lowered import Lowered
from shardwise.runtime.channels import bind_channels, dtype_of
from shardwise.runtime.counts import Counts, Feed
from shardwise.runtime.events import Recorder
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.flow import Tape
from shardwise.runtime.order import FIRST, Order
from shardwise.runtime.overlap import NOTHING, Overlap
from shardwise.runtime.placement import programs_of
from shardwise.runtime.reducer import Reducer
from shardwise.runtime.rules import Surroundings
from shardwise.runtime.session import driver, progress
from shardwise.runtime.stage import BoundStage
from shardwise.runtime.statistics import Ledger, needs_folding
from shardwise.runtime.store import Store
from shardwise.runtime.weights_later import Note

_AHEAD = 4


@dataclass
class _Flight:
    """A micro-batch between its forward and its backward pass on one stage of this rank."""

    arrivals: dict[str, Tensor] = field(default_factory=dict)
    departures: dict[str, Tensor] = field(default_factory=dict)
    tape: Tape | None = None
    grads: dict[str, Tensor] = field(default_factory=dict)
    returns: dict[str, Tensor] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """What the engines of one trainer work with."""

    fabric: Fabric
    store: Store
    device: torch.device
    reducer: Reducer | None = None
    surroundings: Surroundings = field(default_factory=Surroundings)
    recorder: Recorder = field(default_factory=Recorder)
    overlap: Overlap = field(default_factory=Overlap)
    order: Order = FIRST


class Engine:
    """Run steps of one lowered plan on this rank; making one is collective over the world."""

    def __init__(self, lowered: Lowered, bench: Bench) -> None:
        self.lowered, self.bench = lowered, bench
        fabric, store = bench.fabric, bench.store
        mesh, program = fabric.mesh, lowered.program
        self.device, self.reducer = bench.device, bench.reducer
        self.replica, position = mesh.place(fabric.rank)
        self.actions = program.actions[position]
        self.roles = {(role.stage, role.direction): role.member for role in mesh.roles(position)}
        fabric.adopt_stages(programs_of(lowered, mesh))
        folds = program.training and needs_folding(lowered, fabric.size)
        self.ledger = Ledger(lowered, fabric, store) if folds else None
        shares = program.training and mesh.data * program.micro_batches > 1
        self.counts = Counts(lowered, fabric, store) if shares else None
        self.stages: dict[tuple[int, int], BoundStage] = {}
        self._bind_stages()
        self.channels = bind_channels(lowered, fabric, self.roles, self.replica, bench.device, bench.order)
        # Messages between stages travel while others compute; sums of gradients are driven as they start.
        self.between = driver() if self.channels else None
        self._plan_ahead()
        self.run: Mapping[Act, Callable[[Action, int], None]] = {
            Act.RECEIVE: self._receive,
            Act.FORWARD: self._forward,
            Act.SEND: self._send,
            Act.RECEIVE_GRAD: self._receive_grad,
            Act.BACKWARD: self._backward,
            Act.SEND_GRAD: self._send_grad,
            Act.BACKWARD_WEIGHT: self._backward_weight,
            Act.REDUCE: self._reduce,
            Act.STEP: self._step,
        }

    # Preparation.

    def _bind_stages(self) -> None:
        bench, lowered = self.bench, self.lowered
        # A schedule that does the weights' parts at times of its own leaves none to overlap with.
        overlap = NOTHING if lowered.program.splits_backward else bench.overlap
        bound: dict[tuple[int, Direction, int], BoundStage] = {}
        for (stage, direction), member in self.roles.items():
            wires = bench.fabric.wires(self.replica, stage, direction, member)
            for m in range(lowered.program.micro_batches):
                if direction_of(lowered.plan, m) is not direction:
                    continue
                program = lowered.stage(stage, self.replica, m)
                key = (stage, direction, id(program))
                if key not in bound:
                    tensors = self._tensors(stage, direction, member, m)
                    bound[key] = BoundStage(
                        program,
                        member,
                        tensors,
                        wires,
                        bench.device,
                        bench.surroundings,
                        overlap,
                        bench.order,
                    )
                self.stages[stage, m] = bound[key]

    def _tensors(self, stage: int, direction: Direction, member: int, m: int) -> dict[str, Tensor]:
        """Return the parameters and buffers of one stage, with the step's own numbers in their places."""
        program, store = self.lowered.stage(stage, self.replica, m), self.bench.store
        layouts = {**program.parameters, **program.buffers}
        tensors = {n: store.local(n, lay.box(member)) for n, lay in layouts.items() if n in store.tensors}
        if self.counts is not None:
            tensors |= {name: scale for name, scale in self.counts.scales.items() if name in layouts}
        if self.ledger is not None:
            tensors |= self.ledger.views(stage, direction, member)
        return tensors

    def _plan_ahead(self) -> None:
        """Find out once what every action of the list has to know of the others."""
        self.receives: list[int] = []
        self.final: dict[str, int] = {}
        self.last_send: dict[tuple[int, int], int] = {}
        self.later = any(action.act is Act.BACKWARD_WEIGHT for action in self.actions)
        ends = Act.BACKWARD_WEIGHT if self.later else Act.BACKWARD
        for i, action in enumerate(self.actions):
            if action.act in (Act.RECEIVE, Act.RECEIVE_GRAD):
                self.receives.append(i)
            elif action.act in (Act.FORWARD, Act.SEND):
                self.last_send[action.stage, action.micro_batch] = i
            elif action.act is ends:
                program = self.stages[action.stage, action.micro_batch].program
                self.final.update(dict.fromkeys(program.parameters, i))
        self.next_receive = {at: k for k, at in enumerate(self.receives)}

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of the communication buffers, which live as long as the engine."""
        return sum(stage.buffer_bytes for stage in {id(s): s for s in self.stages.values()}.values())

    # One step.

    def step(
        self,
        feed: Feed,
        update: Callable[[], None] | None = None,
        *,
        reduce: bool = True,
        weight: float = 1.0,
        sums: bool = False,
    ) -> Tensor:
        """Run all actions on a mini-batch; return this rank's share of the mean loss.

        Args:
            feed: gives boxes of the inputs and targets.
            update: is called when all gradients are summed.
            reduce: sum the gradients now, or leave them to a later step that adds to them.
            weight: what the gradients are multiplied with.
            sums: whether the loss of the mini-batch is the sum of those of its shares, not their mean.
        """
        self.feed, self.update, self.reduces = feed, update, reduce
        self.weight, self.sums = weight, sums
        self.bench.surroundings.between = self.between
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.input_grads: dict[str, Tensor] = {}
        self.outputs: dict[tuple[str, int], Tensor] = {}
        if self.lowered.program.training:
            self.bench.store.open_gradients()
        if self.counts is not None:
            self.counts.exchange(feed)
        recorder, alone = self.bench.recorder, self.bench.fabric.size == 1
        for i, action in enumerate(self.actions):
            if not alone:
                progress(action.describe)
            with recorder.span(action.act, action) if recorder.on else nullcontext():
                self.run[action.act](action, i)
        if self.ledger is not None:
            self.ledger.fold()
        for transfers in self.channels.values():
            for _, transfer in transfers:
                transfer.drain()
        if not alone:
            progress("what comes between two steps")
        return self.loss

    def _flight(self, action: Action) -> _Flight:
        return self.flights.setdefault((action.stage, action.micro_batch), _Flight())

    def _receive(self, action: Action, index: int) -> None:
        self._post_ahead(index)
        flight = self._flight(action)
        for slot, transfer in self.channels[_edge(action), action.micro_batch, False]:
            flight.arrivals[slot] = transfer.receive(action.micro_batch)

    def _post_ahead(self, index: int) -> None:
        """Post this and the next receives, so that a sender that is ahead never waits for a buffer."""
        first = self.next_receive[index]
        for at in self.receives[first : first + _AHEAD]:
            action = self.actions[at]
            back = action.act is Act.RECEIVE_GRAD
            for _, transfer in self.channels[_edge(action), action.micro_batch, back]:
                transfer.post(action.micro_batch)

    def _forward(self, action: Action, index: int) -> None:
        flight, m = self._flight(action), action.micro_batch
        stage = self.stages[action.stage, m]
        lo, hi = self.lowered.samples(self.replica, m)
        for slot, held in stage.program.arrivals.items():
            if self.lowered.graph[held.value].kind is Kind.INPUT:
                box = in_batch(held.layout.box(stage.rank), lo)
                part = self.feed(held.value, box).to(self.device)
                flight.arrivals[slot] = self.bench.order.arranged(part)
        self.bench.surroundings.first_sample, self.bench.surroundings.samples = lo, hi - lo
        if self.counts is not None:
            self.counts.set(m)
        training = self.lowered.program.training
        later = flight.notes if self.later else None
        flight.departures, flight.tape = stage.forward(flight.arrivals, training, later)
        flight.arrivals = {}
        if self.ledger is not None:
            self.ledger.record(action.stage, action.direction, m)
        for name in self.lowered.graph.output_names:
            if name in flight.departures and training:
                share = float(hi > lo) if self.sums else (hi - lo) / self.lowered.batch
                self._end_in_loss(flight, name, stage.rank == 0, share)
            elif name in flight.departures:
                self.outputs[name, m] = flight.departures[name]
        self._forget(flight, action, index)

    def _end_in_loss(self, flight: _Flight, name: str, speaks: bool, share: float) -> None:
        """Add a share of the loss, and start its gradient on the one rank that speaks for it."""
        value = flight.departures[name]
        if speaks and share:
            self.loss += value.double() * share
        flight.grads[name] = torch.full_like(value, share * self.weight if speaks else 0.0)

    def _forget(self, flight: _Flight, action: Action, index: int) -> None:
        """Drop what is wanted by nobody any more."""
        if self.last_send[action.stage, action.micro_batch] == index:
            flight.departures = {}

    def _send(self, action: Action, index: int) -> None:
        flight, edge = self._flight(action), _edge(action)
        for _, transfer in self.channels[edge, action.micro_batch, False]:
            transfer.send(flight.departures[edge.value], action.micro_batch)
        self._forget(flight, action, index)

    def _receive_grad(self, action: Action, index: int) -> None:
        self._post_ahead(index)
        edge = _edge(action)
        flight, name = self._flight(action), edge.value
        for _, transfer in self.channels[edge, action.micro_batch, True]:
            grad = transfer.receive(action.micro_batch)
            flight.grads[name] = flight.grads[name] + grad if name in flight.grads else grad

    def _backward(self, action: Action, index: int) -> None:
        flight = self._flight(action)
        stage = self.stages[action.stage, action.micro_batch]
        if flight.tape is None:
            raise RuntimeError(f"{action}: there was no forward pass before it")
        flight.returns = stage.backward(flight.tape, flight.grads, self._ready(index))
        flight.tape, flight.grads = None, {}
        if self.lowered.input_gradients:
            self._keep_input_grads(flight, stage, action.micro_batch)

    def _ready(self, index: int) -> Callable[[str], None] | None:
        """Return what is told of the gradients that the action at this index completes, if it does any."""
        reducer = self.reducer
        if reducer is None or not self.reduces or index not in self.final.values():
            return None

        def ready(name: str) -> None:
            if self.final[name] == index:
                reducer.ready(name)
                progress()

        return ready

    def _backward_weight(self, action: Action, index: int) -> None:
        flight = self._flight(action)
        notes, flight.notes = flight.notes, []
        while notes:
            notes.pop(0)()
            progress()
        ready = self._ready(index)
        if ready is not None:
            for name in reversed(self.stages[action.stage, action.micro_batch].program.parameters):
                ready(name)

    def _keep_input_grads(self, flight: _Flight, stage: BoundStage, micro_batch: int) -> None:
        """Add this rank's part of the gradients of the model's inputs in its place of the mini-batch."""
        lo, _ = self.lowered.samples(self.replica, micro_batch)
        for slot, grad in flight.returns.items():
            held = stage.program.arrivals[slot]
            layer = self.lowered.graph[held.value]
            if layer.kind is Kind.INPUT:
                if held.value not in self.input_grads:
                    whole = torch.zeros(layer.shape, dtype=grad.dtype, device=self.device)
                    self.input_grads[held.value] = whole
                box = in_batch(held.layout.box(stage.rank), lo)
                self.input_grads[held.value][box.slices()] += grad

    def _send_grad(self, action: Action, index: int) -> None:
        flight = self._flight(action)
        stage = self.stages[action.stage, action.micro_batch]
        for slot, transfer in self.channels[_edge(action), action.micro_batch, True]:
            grad = flight.returns.pop(slot, None)
            if grad is None:
                held = stage.program.arrivals[slot]
                box = held.layout.box(stage.rank)
                grad = self.bench.order.zeros(box.shape, dtype_of(held), self.device)
            transfer.send(grad, action.micro_batch)

    def _reduce(self, action: Action, index: int) -> None:
        """Nothing to do: the buckets of a stage start while its last backward pass runs."""

    def _step(self, action: Action, index: int) -> None:
        if self.reducer is not None and self.reduces:
            self.reducer.finish()
        if self.update is not None:
            self.update()


def in_batch(box: Box, first: int) -> Box:
    """Move a box of a micro-batch to its place in the mini-batch."""
    return box.shift((first, *(0,) * (box.ndim - 1))) if box.ndim else box


def _edge(action: Action) -> Edge:
    if action.edge is None:
        raise RuntimeError(f"{action}: a message without an edge")
    return action.edge
