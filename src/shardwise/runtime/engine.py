"""Execute the program of a step: one rank's actions, bound to tensors, wires and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.geometry import Box, Layout, Message, messages
from shardwise.graph import Kind
from shardwise.plan.micro_batches import Direction, direction_of, micro_batches_of
from shardwise.program import Held, StageProgram
from shardwise.program.actions import Act, Action, Edge
from shardwise.program.lowered import Lowered
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.reducer import Reducer
from shardwise.runtime.rules import Surroundings
from shardwise.runtime.stage import BoundStage, Tape
from shardwise.runtime.store import Store
from shardwise.runtime.transfer import Transfer


@dataclass
class _Flight:
    """A micro-batch between its forward and its backward pass on one stage of this rank."""

    arrivals: dict[str, Tensor] = field(default_factory=dict)
    departures: dict[str, Tensor] = field(default_factory=dict)
    tape: Tape | None = None
    grads: dict[str, Tensor] = field(default_factory=dict)
    returns: dict[str, Tensor] = field(default_factory=dict)


class Engine:
    """Run steps of one lowered plan on this rank."""

    def __init__(
        self,
        lowered: Lowered,
        fabric: Fabric,
        store: Store,
        device: torch.device,
        reducer: Reducer | None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.surroundings = surroundings or Surroundings()
        self.lowered, self.fabric, self.store, self.device, self.reducer = (
            lowered,
            fabric,
            store,
            device,
            reducer,
        )
        mesh, plan = fabric.mesh, lowered.plan
        self.replica, self.position = mesh.place(fabric.rank)
        self.actions = lowered.program.actions[self.position]
        self.roles = {(role.stage, role.direction): role.member for role in mesh.roles(self.position)}
        self.count = micro_batches_of(plan)
        self.stages: dict[tuple[int, int], BoundStage] = {}
        self.transfers: dict[tuple[Edge, int, bool], list[tuple[str, Transfer]]] = {}
        bound: dict[tuple[int, Direction, int], BoundStage] = {}
        for (stage, direction), member in self.roles.items():
            wires = fabric.wires(self.replica, stage, direction, member)
            for m in self._micro_batches(direction):
                program = lowered.stage(stage, self.replica, m)
                key = (stage, direction, id(program))
                if key not in bound:
                    bound[key] = BoundStage(program, member, store.tensors, wires, device, self.surroundings)
                self.stages[stage, m] = bound[key]
        self._bind_transfers()
        self.last = {a.stage: i for i, a in enumerate(self.actions) if a.act is Act.BACKWARD}
        self.run: Mapping[Act, Callable[[Action, int], None]] = {
            Act.RECEIVE: self._receive,
            Act.FORWARD: self._forward,
            Act.SEND: self._send,
            Act.RECEIVE_GRAD: self._receive_grad,
            Act.BACKWARD: self._backward,
            Act.SEND_GRAD: self._send_grad,
            Act.REDUCE: self._reduce,
            Act.STEP: self._step,
        }

    def _micro_batches(self, direction: Direction) -> list[int]:
        return [m for m in range(self.count) if direction_of(self.lowered.plan, m) is direction]

    # Wiring of the edges.

    def _bind_transfers(self) -> None:
        """Prepare the messages of every edge that this rank is an end of, per micro-batch size."""
        lowered, mesh = self.lowered, self.fabric.mesh
        made: dict[tuple[int, int, int, Direction, bool], list[tuple[str, Transfer]]] = {}
        for index, edge in enumerate(lowered.program.edges):
            for m in range(self.count):
                direction = direction_of(lowered.plan, m)
                if not {(edge.source, direction), (edge.target, direction)} & set(self.roles):
                    continue
                source = lowered.stage(edge.source, self.replica, m)
                target = lowered.stage(edge.target, self.replica, m)
                ends = (
                    mesh.group(self.replica, edge.source, direction),
                    mesh.group(self.replica, edge.target, direction),
                )
                for back in (False, True):
                    key = (index, id(source), id(target), direction, back)
                    if key not in made:
                        made[key] = self._transfers(index, edge, source, target, ends, direction, back)
                    self.transfers[edge, m, back] = made[key]

    def _transfers(
        self,
        index: int,
        edge: Edge,
        source: StageProgram,
        target: StageProgram,
        ends: tuple[Sequence[int], Sequence[int]],
        direction: Direction,
        back: bool,
    ) -> list[tuple[str, Transfer]]:
        """Return one transfer for every way in which the target stage wants the value."""
        result = []
        made = source.departures[edge.value].layout.on(ends[0])
        wanted = [held for held in target.arrivals.values() if held.value == edge.value]
        stride = 2 * 8 * 64 * len(self.lowered.program.edges)
        for i, held in enumerate(wanted):
            there = held.layout.on(ends[1])
            listed = messages(made, there)
            ways: tuple[Layout, Layout] = (made, there)
            if back:
                listed = tuple(Message(m.target, m.source, m.box) for m in listed)
                ways = (there, made)
            tag = (((index * 2 + (direction is Direction.UP)) * 2 + back) * 8 + i) * 32
            me = self.fabric.rank
            transfer = Transfer(
                listed, me, ways[0].box(me), ways[1].box(me), self.fabric.world, _dtype(held), self.device,
                tag, stride, f"{'gradient of ' if back else ''}{edge.value}",
            )  # fmt: skip
            result.append((held.slot, transfer))
        return result

    # One step.

    def step(self, inputs: Mapping[str, Tensor], update: Callable[[], None] | None = None) -> Tensor:
        """Run all actions on a mini-batch; return this rank's share of the mean loss.

        `inputs` are the global inputs and targets by the name of their layer.
        """
        self.inputs, self.update = inputs, update
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.input_grads: dict[str, Tensor] = {}
        for i, action in enumerate(self.actions):
            self.run[action.act](action, i)
        for transfers in self.transfers.values():
            for _, transfer in transfers:
                transfer.drain()
        return self.loss

    def _flight(self, action: Action) -> _Flight:
        return self.flights.setdefault((action.stage, action.micro_batch), _Flight())

    def _receive(self, action: Action, index: int) -> None:
        self._post_ahead(index)
        flight = self._flight(action)
        assert action.edge is not None
        for slot, transfer in self.transfers[action.edge, action.micro_batch, False]:
            flight.arrivals[slot] = transfer.receive(action.micro_batch)

    def _post_ahead(self, index: int) -> None:
        """Post this and the next receive, so that a sender that is ahead never waits for a buffer."""
        ahead = 0
        for action in self.actions[index:]:
            if action.act in (Act.RECEIVE, Act.RECEIVE_GRAD):
                assert action.edge is not None
                back = action.act is Act.RECEIVE_GRAD
                for _, transfer in self.transfers[action.edge, action.micro_batch, back]:
                    transfer.post(action.micro_batch)
                ahead += 1
                if ahead == 4:
                    return

    def _forward(self, action: Action, index: int) -> None:
        flight = self._flight(action)
        stage = self.stages[action.stage, action.micro_batch]
        lo, hi = self.lowered.samples(self.replica, action.micro_batch)
        graph = self.lowered.graph
        for slot, held in stage.program.arrivals.items():
            if graph[held.value].kind is Kind.INPUT:
                box = held.layout.box(stage.rank)
                tensor = self.inputs[held.value][lo:hi] if held.layout.shape else self.inputs[held.value]
                flight.arrivals[slot] = tensor[box.slices()].to(self.device)
        training = self.lowered.program.training
        self.surroundings.first_sample = lo
        flight.departures, flight.tape = stage.forward(flight.arrivals, keep=training)
        flight.arrivals = {}
        for name in graph.output_names:
            if name in flight.departures and training:
                share = (hi - lo) / self.lowered.batch
                if stage.rank == 0:
                    self.loss += flight.departures[name].double() * share
                held = stage.program.departures[name]
                seed = share if stage.rank == 0 else 0.0
                flight.grads[name] = torch.full_like(flight.departures[name], seed)

    def _send(self, action: Action, index: int) -> None:
        assert action.edge is not None
        value = self._flight(action).departures[action.edge.value]
        for _, transfer in self.transfers[action.edge, action.micro_batch, False]:
            transfer.send(value, action.micro_batch)

    def _receive_grad(self, action: Action, index: int) -> None:
        self._post_ahead(index)
        assert action.edge is not None
        flight, name = self._flight(action), action.edge.value
        for _, transfer in self.transfers[action.edge, action.micro_batch, True]:
            grad = transfer.receive(action.micro_batch)
            flight.grads[name] = flight.grads[name] + grad if name in flight.grads else grad

    def _backward(self, action: Action, index: int) -> None:
        flight = self._flight(action)
        stage = self.stages[action.stage, action.micro_batch]
        assert flight.tape is not None
        final = self.last[action.stage] == index and self.reducer is not None
        ready = self.reducer.ready if final and self.reducer is not None else None
        flight.returns = stage.backward(flight.tape, flight.grads, ready)
        flight.tape, flight.grads, flight.departures = None, {}, {}
        if self.lowered.input_gradients:
            self._keep_input_grads(flight, stage, action)

    def _keep_input_grads(self, flight: _Flight, stage: BoundStage, action: Action) -> None:
        """Add this rank's part of the gradients of the model's inputs to their place in the mini-batch."""
        lo, hi = self.lowered.samples(self.replica, action.micro_batch)
        for slot, grad in flight.returns.items():
            held = stage.program.arrivals[slot]
            if self.lowered.graph[held.value].kind is Kind.INPUT:
                whole = torch.zeros_like(self.inputs[held.value], device=self.device)
                whole = self.input_grads.setdefault(held.value, whole)
                whole[lo:hi][held.layout.box(stage.rank).slices()] += grad

    def _send_grad(self, action: Action, index: int) -> None:
        assert action.edge is not None
        flight = self._flight(action)
        stage = self.stages[action.stage, action.micro_batch]
        for slot, transfer in self.transfers[action.edge, action.micro_batch, True]:
            grad = flight.returns.pop(slot, None)
            if grad is None:
                held = stage.program.arrivals[slot]
                box: Box = held.layout.box(stage.rank)
                grad = torch.zeros(box.shape, dtype=_dtype(held), device=self.device)
            transfer.send(grad, action.micro_batch)

    def _reduce(self, action: Action, index: int) -> None:
        """Nothing to do: the buckets of a stage start while its last backward pass runs."""

    def _step(self, action: Action, index: int) -> None:
        if self.reducer is not None:
            self.reducer.finish()
        if self.update is not None:
            self.update()


def _dtype(held: Held) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, held.spec.dtype)
    return dtype
