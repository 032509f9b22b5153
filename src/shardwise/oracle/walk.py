"""Walk the program of a step: every rank's actions become events with seconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.graph import Kind as LayerKind
from shardwise.machine import Machine
from shardwise.oracle.around import counting, folding
from shardwise.oracle.events import Event, Kind, Span, Speed
from shardwise.oracle.kernels import KernelTimes
from shardwise.oracle.memory import Footprint, footprints
from shardwise.oracle.price import STATISTICS, price_stage
from shardwise.oracle.reductions import REDUCTION, Bucket, buckets_of, launch_and_wait
from shardwise.oracle.segments import Done, Segment
from shardwise.oracle.stage_price import StagePrice
from shardwise.oracle.transfers import Crossing, price_crossings
from shardwise.plan import Mesh
from shardwise.plan.edges import Edge
from shardwise.plan.mesh import mesh_of
from shardwise.plan.micro_batches import direction_of
from shardwise.program import StageProgram
from shardwise.program.actions import Act, Action
from shardwise.program.lowered import Lowered

UPDATE, INPUT = "update", "input"
StageOf = Callable[[int, int, int], StageProgram]


@dataclass
class Walk:
    """The priced step of a plan.

    Args:
        lowered: the step.
        machine: what it runs on.
        kernels: times of computations.
        replicas: how many data replicas are simulated; the others do the same.
        stage_of: the lowered stage for (stage, replica, micro-batch).
        prices, sizes: what is known of stages, shared with walks of other plans on the same machine.
    """

    lowered: Lowered
    machine: Machine
    kernels: KernelTimes
    replicas: int
    stage_of: StageOf
    prices: dict[tuple[object, ...], StagePrice] = field(default_factory=dict)
    sizes: dict[int, tuple[Footprint, ...]] = field(default_factory=dict)
    fields: set[str] = field(default_factory=set)
    flags: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        plan, crowd = self.lowered.plan, self.machine.crowd
        self.mesh: Mesh = mesh_of(plan, crowd if 0 < crowd < plan.ranks else None)
        self.programs = [self.stage_of(s, 0, 0) for s in range(self.mesh.stages)]
        # As the trainer does: sums by Gloo's threads wait until the cores that they need are free.
        busy = max(crowd, 1) * self.machine.device.threads >= self.machine.node.cores
        self.early = not (self.machine.transport == "gloo" and self.machine.device.host and busy)
        self.simulated = tuple(
            self.mesh.world_rank(r, p) for r in range(self.replicas) for p in range(self.mesh.positions)
        )
        self.buckets: list[list[Bucket]] = buckets_of(self.programs, self.mesh)
        sets = {bucket.positions for buckets in self.buckets for bucket in buckets}
        node, device = self.machine.node, self.machine.device
        # Where ranks share cores, messages at once share them too: the simulation sees that by itself.
        crowded = device.host and self.mesh.size > node.cores
        self.flows = 1 if crowded else min(node.devices, max(1, len(sets)))
        self.crossings: dict[tuple[object, ...], tuple[Crossing, ...]] = {}
        self.computed: dict[int, dict[int, list[Done]]] = {}
        self.crossed: dict[tuple[int, int, int, bool], tuple[Crossing, ...]] = {}
        self.sums: dict[tuple[tuple[int, ...], int], tuple[Event, Event]] = {}
        self.edge_index = {edge: i for i, edge in enumerate(self.lowered.program.edges)}
        # The fullest moment of every position, once somebody has looked for it.
        self.moments: dict[int, tuple[float, float, float]] = {}
        # What every rank does when, by how ranks share cores.
        self.spans: dict[tuple[object, ...], tuple[Span, ...]] = {}

    @cached_property
    def events(self) -> dict[int, list[Event]]:
        """Return the events of every simulated rank of the world."""
        result = {}
        for replica in range(self.replicas):
            for position in range(self.mesh.positions):
                rank = self.mesh.world_rank(replica, position)
                result[rank] = list(self._rank(replica, position, rank))
        return result

    @cached_property
    def paces(self) -> dict[int, Speed]:
        """Return for every simulated rank how fast it computes beside more or fewer others than usual."""
        device, program = self.machine.device, self.lowered.program
        if not device.host:
            return {}
        ways = [direction_of(self.lowered.plan, m) for m in range(program.micro_batches)]
        result = {}
        for replica in range(self.replicas):
            for position in range(self.mesh.positions):
                busy = crowded = device.update_seconds(self.trained(position).values())
                alone = busy / device.update_alone_speedup
                for role in self.mesh.roles(position):
                    for m, way in enumerate(ways):
                        if way is role.direction:
                            price = self.price(role.stage, replica, m)
                            busy += price.busy[role.member]
                            alone += price.alone[role.member]
                            crowded += price.crowded[role.member]
                rank = self.mesh.world_rank(replica, position)
                # What was measured where ranks take turns says nothing of ranks with cores of their own.
                slower = max(1.0, crowded / busy) if busy and self.machine.crowded else 1.0
                faster = max(1.0, busy / alone) if alone else 1.0
                result[rank] = Speed(faster, slower, self.machine.waiting_seconds)
        return result

    def price(self, stage: int, replica: int, m: int) -> StagePrice:
        """Return the priced stage for one micro-batch."""
        direction = direction_of(self.lowered.plan, m)
        program = self.stage_of(stage, replica, m)
        mesh = self.mesh
        group = mesh.group(replica, stage, direction)
        key = (id(program), group, mesh.data, mesh.positions, direction, self.replicas > 1)
        if key not in self.prices:
            shared = mesh.data > 1
            replicas = [mesh.group(r, stage, direction) for r in range(mesh.data)] if shared else ()
            self.prices[key] = price_stage(
                program,
                self.machine,
                self.kernels,
                ranks=group,
                replicas=replicas,
                together=self.replicas > 1,
                computed=self.computed.setdefault(id(program), {}),
            )
        price = self.prices[key]
        self.fields |= price.fields
        self.flags |= price.flags
        return price

    def crossing(self, edge: Edge, replica: int, m: int, back: bool) -> tuple[Crossing, ...]:
        """Return the priced messages of an edge."""
        # Edges live as long as the step; what they are is compared once, not for every message.
        asked = (id(edge), replica, m, back)
        if asked not in self.crossed:
            self.crossed[asked] = self._crossing(edge, replica, m, back)
        return self.crossed[asked]

    def _crossing(self, edge: Edge, replica: int, m: int, back: bool) -> tuple[Crossing, ...]:
        direction = direction_of(self.lowered.plan, m)
        source = self.stage_of(edge.source, replica, m)
        target = self.stage_of(edge.target, replica, m)
        key = (edge, replica, direction, back, id(source), id(target))
        if key not in self.crossings:
            ends = (
                self.mesh.group(replica, edge.source, direction),
                self.mesh.group(replica, edge.target, direction),
            )
            self.crossings[key] = price_crossings(
                edge.value, source, target, ends, self.machine, self.fields, back=back
            )
        return self.crossings[key]

    def _rank(self, replica: int, position: int, rank: int) -> Iterator[Event]:
        actions = self.lowered.program.actions[position]
        roles = {(role.stage, role.direction): role.member for role in self.mesh.roles(position)}
        ends = Act.BACKWARD_WEIGHT if self.lowered.program.splits_backward else Act.BACKWARD
        last = {a.stage: i for i, a in enumerate(actions) if a.act is ends}
        pending = list(enumerate(self.buckets[position]))
        missing = [set(bucket.names) for bucket in self.buckets[position]]
        started: set[int] = set()
        summed: set[int] = set()
        yield from self._input(replica, position, rank)
        yield from counting(self.lowered, self.mesh, self.machine, rank, self.simulated)
        for i, action in enumerate(actions):
            if action.act in (Act.RECEIVE, Act.RECEIVE_GRAD, Act.SEND, Act.SEND_GRAD):
                yield from self._message(action, replica, rank)
            elif action.act is Act.FORWARD:
                member = roles[action.stage, action.direction]
                yield from self._keyed(self._price(action, replica).ahead[member], action, replica)
            elif action.act in (Act.BACKWARD, Act.BACKWARD_WEIGHT):
                final = last.get(action.stage) == i
                member = roles[action.stage, action.direction]
                adds = action.stage in summed and action.act is ends
                for segment in self._price(action, replica).segments[member]:
                    yield from self._backward(segment, action, replica)
                    if adds and segment.later_seconds:
                        yield Event(Kind.WORK, segment.later_seconds, "backward", "adding gradients")
                    if final and self.early:
                        # Sums of the same ranks start in one order: one that is complete early waits.
                        held_up: set[tuple[int, ...]] = set()
                        for number, bucket in pending:
                            missing[number].difference_update(segment.ready)
                            if missing[number]:
                                held_up.add(bucket.positions)
                            elif number not in started and bucket.positions not in held_up:
                                started.add(number)
                                yield self._sum(bucket)[0]
                if action.act is ends:
                    summed.add(action.stage)
            elif action.act is Act.STEP:
                for number, bucket in pending:
                    if number not in started:
                        yield self._sum(bucket)[0]
                for _, bucket in pending:
                    yield self._sum(bucket)[1]
                yield from self._finish(position)
        yield from folding(self.lowered, self.mesh, self.machine, rank, self.simulated, self.programs)
        yield from self._loss()

    def _price(self, action: Action, replica: int) -> StagePrice:
        return self.price(action.stage, replica, action.micro_batch)

    def _keyed(
        self, events: list[Event] | tuple[Event, ...], action: Action, replica: int
    ) -> Iterator[Event]:
        """Make the meetings of a pass its own; statistics are shared with other replicas."""
        for event in events:
            if event.kind is Kind.WORK:
                yield event
            else:
                of = -1 if event.category == STATISTICS and self.replicas > 1 else replica
                key = (action.stage, action.micro_batch, of, event.key)
                yield Event(event.kind, event.seconds, event.category, event.label, key, event.peers)

    def _backward(self, segment: Segment, action: Action, replica: int) -> Iterator[Event]:
        if not self.lowered.program.splits_backward:
            yield from self._keyed(segment.events, action, replica)
        elif action.act is Act.BACKWARD_WEIGHT:
            if segment.weight_seconds:
                yield Event(Kind.WORK, segment.weight_seconds, "backward", "weights")
        else:
            less = segment.weight_seconds
            for event in self._keyed(segment.events, action, replica):
                if event.kind is Kind.WORK and less:
                    yield Event(Kind.WORK, max(0.0, event.seconds - less), event.category, event.label)
                    less = 0.0
                else:
                    yield event

    def _message(self, action: Action, replica: int, rank: int) -> Iterator[Event]:
        assert action.edge is not None
        back = action.act in (Act.RECEIVE_GRAD, Act.SEND_GRAD)
        crossings = self.crossing(action.edge, replica, action.micro_batch, back)
        for i, crossing in enumerate(crossings):
            key = (self.edge_index[action.edge], action.micro_batch, back, i)
            sends = action.act in (Act.SEND, Act.SEND_GRAD)
            yield from crossing.sends(rank, key) if sends else crossing.receives(rank, key)

    def _sum(self, bucket: Bucket) -> tuple[Event, Event]:
        key = (bucket.positions, bucket.number)
        if key not in self.sums:
            self.sums[key] = launch_and_wait(
                bucket, self.mesh, self.machine, self.flows, self.replicas, self.fields
            )
        return self.sums[key]

    def _input(self, replica: int, position: int, rank: int) -> Iterator[Event]:
        """Read this rank's part of the mini-batch, where the machine says how fast that is."""
        rate, nbytes = self.machine.input_bytes_per_second, 0
        if rate:
            self.fields.add("input_bytes_per_second")
            nbytes = self._input_bytes(replica, position)
        if nbytes:
            yield Event(Kind.WORK, nbytes * self.readers[rank // self._per_node] / rate, INPUT, "input")

    def _input_bytes(self, replica: int, position: int) -> int:
        graph, total = self.lowered.graph, 0
        for m in range(self.lowered.program.micro_batches):
            direction = direction_of(self.lowered.plan, m)
            for role in self.mesh.roles(position):
                if role.direction is direction:
                    for held in self.stage_of(role.stage, replica, m).arrivals.values():
                        if graph[held.value].kind is LayerKind.INPUT:
                            total += held.layout.box(role.member).size * held.spec.itemsize
        return total

    @cached_property
    def readers(self) -> Counter[int]:
        """Return how many ranks of each node read a part of the mini-batch."""
        reading = [p for p in range(self.mesh.positions) if self._input_bytes(0, p)]
        ranks = (self.mesh.world_rank(r, p) for r in range(self.mesh.data) for p in reading)
        return Counter(rank // self._per_node for rank in ranks)

    @property
    def _per_node(self) -> int:
        return max(self.machine.node.devices, self.machine.crowd)

    def _finish(self, position: int) -> Iterator[Event]:
        """Update the weights."""
        machine = self.machine
        self.fields.add("device.update_bytes_per_second")
        seconds = machine.device.update_seconds(self.trained(position).values())
        yield Event(Kind.WORK, seconds, UPDATE, "optimizer")

    def _loss(self) -> Iterator[Event]:
        """Add up the loss for everybody."""
        machine, size = self.machine, self.mesh.size
        if size > 1:
            seconds = machine.sum_seconds(machine.tier((0, size - 1)), size, 8)
            yield Event(Kind.MEET, seconds, REDUCTION, "loss", ("loss",), self.simulated)

    def footprints(self, position: int, m: int = 0) -> dict[int, Footprint]:
        """Return what one micro-batch needs on a position, by stage."""
        result = {}
        for role in self.mesh.roles(position):
            program = self.stage_of(role.stage, 0, m)
            if id(program) not in self.sizes:
                self.sizes[id(program)] = footprints(program, self.kernels, self.machine.device.host)
            result[role.stage] = self.sizes[id(program)][role.member]
        return result

    def trained(self, position: int) -> dict[str, int]:
        """Return the bytes of each parameter that a position updates."""
        return {n: size for f in self.footprints(position).values() for n, size in f.trained.items()}

    def spread(self) -> float:
        """Return the standard deviation of a step: of the stage whose kernels vary most."""
        program = self.lowered.program
        variances = [self.price(s, 0, 0).variance * program.micro_batches**2 for s in range(program.stages)]
        return math.sqrt(max(variances, default=0.0))
