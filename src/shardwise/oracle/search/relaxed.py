"""A training step with fewer constraints than it has: it takes at most as long, and is sooner simulated.

Every rank goes through the passes of its schedule, each in one piece (`Passes`); passes wait for the messages
of other stages, sums of gradients begin with the last backward pass instead of within it, and all ranks meet
for the loss. Left out are meetings inside of groups, copies, and that ranks that meet are late. What is left
takes no longer than in the step itself, and waits for no more: its end is a lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from shardwise.geometry import messages
from shardwise.machine import Machine
from shardwise.oracle.around import counting, folding
from shardwise.oracle.events import Event, Kind, end_of, simulate
from shardwise.oracle.reductions import REDUCTION, Bucket, buckets_of, launch_and_wait
from shardwise.oracle.search.work import Pass, Passes
from shardwise.plan import Plan
from shardwise.plan.edges import Edge
from shardwise.plan.mesh import mesh_of
from shardwise.plan.micro_batches import Direction, direction_of, micro_batches_of, samples_of
from shardwise.program.actions import Act, Action
from shardwise.program.build import build
from shardwise.program.lowered import Lowered

_ROUNDING = 1 - 1e-9
_WORK = "work"


class Relaxed:
    """Bound one plan.

    Args:
        plan: which one.
        passes: of a step with the same stages, cut alike.
        machine: as the plan's ranks see it.
        gain: how much faster a rank works beside idle cores than on a busy node, at most.
        cores: of the nodes on which ranks take turns; 0: each rank has its own.
    """

    def __init__(
        self, plan: Plan, passes: Passes, machine: Machine, gain: float = 1.0, cores: int = 0
    ) -> None:
        self.plan, self.passes, self.machine, self.gain, self.cores = plan, passes, machine, gain, cores
        self.batch, crowd = passes.step.batch, machine.crowd
        self.mesh = mesh_of(plan, crowd if 0 < crowd < plan.ranks else None)
        self.world = tuple(self.mesh.world_rank(0, p) for p in range(self.mesh.positions))
        self.parts = [
            (hi - lo, direction_of(plan, m))
            for m in range(micro_batches_of(plan))
            for lo, hi in [samples_of(plan, self.batch, 0, m)]
        ]
        self.crossings: dict[tuple[object, ...], tuple[tuple[int, int, float, float], ...]] = {}

    @cached_property
    def step(self) -> Lowered:
        """Return the step; its stages need not be lowered."""
        alike = self.passes.step
        return Lowered(alike.graph, self.plan, alike.cuts, build(self.plan, alike.program.edges))

    def busiest(self) -> float:
        """Return what the ranks work at least, whatever they wait for: the first one of each group."""
        mesh = self.mesh
        each = [0.0] * mesh.positions
        first = sorted({mesh.member_positions(stage)[0] for stage in range(mesh.stages)})
        places = list(range(mesh.positions)) if self.cores else first
        for position in places:
            for role in mesh.roles(position):
                for (samples, way), count in Counter(self.parts).items():
                    if way is role.direction and samples:
                        alone = self.passes.computing(role.stage, role.member, samples)[1].both
                        talk = self._talk(role.stage, role.member, samples, way).both
                        each[position] += count * (alone + talk / self.gain)
            each[position] += self._update(position) / self.gain
        # Replicas whose share is smaller by a sample work less than the first one.
        alike = mesh.data if self.batch % mesh.data == 0 else 1
        shared = sum(each) * alike / self.cores if self.cores else 0.0
        return max(shared, *each) * _ROUNDING

    def seconds(self) -> float:
        """Return when the last rank is done."""
        lists = {rank: list(self._rank(p, rank)) for p, rank in enumerate(self.world)}
        return end_of(simulate(lists)) * _ROUNDING

    def _talk(self, stage: int, member: int, samples: int, way: Direction) -> Pass:
        groups = tuple(self.mesh.group(r, stage, way) for r in range(self.mesh.data))
        return self.passes.talking(stage, member, samples, groups, self.machine)

    def _update(self, position: int) -> float:
        trained: dict[str, float] = {}
        for role in self.mesh.roles(position):
            trained |= self.passes.trained(role.stage, role.member)
        return self.machine.device.update_seconds(trained.values())

    @cached_property
    def sums(self) -> list[list[tuple[Bucket, Event, Event]]]:
        """Return for every position the sums of its gradients, with their starts and waits."""
        machine, mesh = self.machine, self.mesh
        buckets = buckets_of(self.passes.programs, mesh)
        crowded = machine.device.host and mesh.size > machine.node.cores
        sets = {bucket.positions for mine in buckets for bucket in mine}
        flows = 1 if crowded else min(machine.node.devices, max(1, len(sets)))
        return [[(b, *launch_and_wait(b, mesh, machine, flows, 1, set())) for b in mine] for mine in buckets]

    def _rank(self, position: int, rank: int) -> Iterator[Event]:
        program, mesh = self.step.program, self.mesh
        roles = {(role.stage, role.direction): role.member for role in mesh.roles(position)}
        ends = Act.BACKWARD_WEIGHT if program.splits_backward else Act.BACKWARD
        actions = program.actions[position]
        known: dict[tuple[object, ...], Event] = {}
        launched: set[int] = set()
        last = {a.stage: i for i, a in enumerate(actions) if a.act is ends}
        yield from map(self._faster, counting(self.step, mesh, self.machine, rank, self.world))
        for i, action in enumerate(actions):
            if action.act in (Act.RECEIVE, Act.RECEIVE_GRAD, Act.SEND, Act.SEND_GRAD):
                yield from self._message(action, rank)
            elif action.act in (Act.FORWARD, Act.BACKWARD, Act.BACKWARD_WEIGHT):
                if action.act is ends and last[action.stage] == i:
                    yield from self._launches(position, action.stage, launched)
                key = (action.act, action.stage, self.parts[action.micro_batch])
                if key not in known:
                    seconds = self._pass(action, roles[action.stage, action.direction])
                    known[key] = Event(Kind.WORK, seconds, _WORK)
                yield known[key]
            elif action.act is Act.STEP:
                yield from self._waits(position)
                yield Event(Kind.WORK, self._update(position) / self.gain, _WORK)
        programs = self.passes.programs
        yield from map(self._faster, folding(self.step, mesh, self.machine, rank, self.world, programs))
        if mesh.size > 1:
            seconds = self.machine.sum_seconds(self.machine.tier((0, mesh.size - 1)), mesh.size, 8)
            yield Event(Kind.MEET, seconds / self.gain, _WORK, key=("loss",), peers=self.world)

    def _faster(self, event: Event) -> Event:
        return event._replace(seconds=event.seconds / self.gain)

    def _pass(self, action: Action, member: int) -> float:
        samples = self.parts[action.micro_batch][0]
        if not samples:
            return 0.0
        busy = self.passes.computing(action.stage, member, samples)[0]
        talk = self._talk(action.stage, member, samples, action.direction)
        if action.act is Act.FORWARD:
            return (busy.forward + talk.forward) / self.gain
        if action.act is Act.BACKWARD_WEIGHT:
            return busy.weight / self.gain
        late = busy.weight if self.step.program.splits_backward else 0.0
        return (busy.backward - late + talk.backward) / self.gain

    def _launches(self, position: int, stage: int, launched: set[int]) -> Iterator[Event]:
        """Yield the starts of a stage's sums, as if all gradients were there when its last pass begins."""
        names = self.passes.programs[stage].parameters
        for number, (bucket, launch, _) in enumerate(self.sums[position]):
            if number not in launched and not bucket.names.isdisjoint(names):
                launched.add(number)
                yield launch._replace(seconds=0.0)

    def _waits(self, position: int) -> Iterator[Event]:
        # Of two stages either one may be done first: which of their sums is waited for last is not known.
        sums, one = self.sums[position], len(self.mesh.directions) == 1
        yield Event(Kind.WORK, sum(launch.seconds for _, launch, _ in sums) / self.gain, REDUCTION)
        for _, _, wait in sums:
            yield wait._replace(seconds=wait.seconds / self.gain if one else 0.0)

    def _message(self, action: Action, rank: int) -> Iterator[Event]:
        assert action.edge is not None
        back = action.act in (Act.RECEIVE_GRAD, Act.SEND_GRAD)
        sends = action.act in (Act.SEND, Act.SEND_GRAD)
        samples = self.parts[action.micro_batch][0]
        for i, (a, b, flight, work) in enumerate(
            self._crossing(action.edge, samples, action.direction, back)
        ):
            key = (action.edge, action.micro_batch, back, i)
            if sends and a == rank:
                yield Event(Kind.SEND, 0.0, _WORK, key=key, flight=flight)
            elif not sends and b == rank:
                yield Event(Kind.RECEIVE, work / self.gain, _WORK, key=key)

    def _crossing(
        self, edge: Edge, samples: int, way: Direction, back: bool
    ) -> tuple[tuple[int, int, float, float], ...]:
        """Return the parcels of an edge: from whom, to whom, and the seconds of their way and of work."""
        key = (edge, samples, way, back)
        if key not in self.crossings:
            self.crossings[key] = tuple(self._parcels(edge, samples, way, back))
        return self.crossings[key]

    def _parcels(
        self, edge: Edge, samples: int, way: Direction, back: bool
    ) -> Iterator[tuple[int, int, float, float]]:
        source, target = (self.passes.programs[s] for s in (edge.source, edge.target))
        ends = [self.mesh.group(0, stage, way) for stage in (edge.source, edge.target)]
        made = source.departures[edge.value].layout.on(ends[0])
        for held in target.arrivals.values():
            if held.value != edge.value:
                continue
            pairs: dict[tuple[int, int], list[float]] = {}
            for m in messages(made, held.layout.on(ends[1])):
                size = self.passes.share(m.box, samples) * held.spec.itemsize
                ranks = (m.target, m.source) if back else (m.source, m.target)
                if ranks[0] != ranks[1] and size:
                    pairs.setdefault(ranks, []).append(size)
            for (a, b), sizes in pairs.items():
                tier = self.machine.tier((a, b))
                seconds = sum(tier.message_seconds(size) for size in sizes)
                yield a, b, seconds * tier.overlap, seconds * (1 - tier.overlap)
