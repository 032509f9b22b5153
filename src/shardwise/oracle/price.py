"""Price a lowered stage: every operation of every rank becomes an event with its seconds.

What is priced is the program that the runtime executes and the message lists that it sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.geometry import Message
from shardwise.machine import Machine, Tier
from shardwise.oracle.events import Event, Kind
from shardwise.oracle.kernels import WEIGHTED, Direction, Estimate, KernelTimes, Task
from shardwise.oracle.moves import Move, joins, move_of, sum_of
from shardwise.oracle.segments import Events, Segment, cut_backward, last_uses, merged
from shardwise.program import Compute, Normalise, Op, Regrid, StageProgram

FORWARD, BACKWARD, HALO, STATISTICS = "forward", "backward", "halo", "statistics"


@dataclass
class StagePrice:
    """The priced operations of a stage, for each rank of the group, in execution order.

    `forward[r]` and `backward[r]` are event lists for one micro-batch; keys of meetings are positions in
    the program and become unique when a schedule puts several of them in a row. `ops[r]` has the forward
    and backward seconds of each operation. `variance` is the summed squared spread of one rank's kernels.
    `ahead[r]` and `segments[r]` are the same passes with computations between communications in one piece.
    `busy[r]`, `alone[r]` and `crowded[r]` are the seconds of all computations and copies on a busy node, on
    one whose other cores are idle, and those on a core of one where more ranks than cores work.
    """

    width: int
    ranks: tuple[int, ...]
    forward: list[list[Event]] = field(default_factory=list)
    backward: list[list[Event]] = field(default_factory=list)
    ops: list[list[tuple[Op, float, float]]] = field(default_factory=list)
    ahead: list[list[Event]] = field(default_factory=list)
    segments: list[list[Segment]] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    crowded: list[float] = field(default_factory=list)
    variance: float = 0.0
    flags: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)

    def items(self, rank: int) -> Iterator[tuple[Op, float]]:
        """Yield each operation of a rank with its seconds, forward and backward together."""
        for op, forward, backward in self.ops[rank]:
            yield op, forward + backward


def price_stage(
    program: StageProgram,
    machine: Machine,
    kernels: KernelTimes,
    *,
    ranks: Sequence[int] | None = None,
    replicas: Sequence[Sequence[int]] = (),
    together: bool = False,
) -> StagePrice:
    """Return the events of one micro-batch's forward and backward pass through a stage.

    Args:
        program: the lowered stage.
        machine: for the times of messages.
        kernels: for the times of computations.
        ranks: the world rank of each position in the group; default 0, 1, ...
        replicas: the same for every data replica, this one included; statistics are shared with them.
        together: whether the replicas are simulated too, so that these are waited for.
    """
    world = tuple(ranks) if ranks is not None else tuple(range(program.width))
    price = StagePrice(program.width, world)
    groups = tuple(map(tuple, replicas)) or (world,)
    pricer = _Pricer(program, machine, kernels, world, groups, price, together)
    ready = last_uses(program.ops)
    for position in range(program.width):
        pairs = [pricer.op(op, position, index) for index, op in enumerate(program.ops)]
        price.forward.append([event for there, _ in pairs for event in there])
        price.backward.append([event for _, back in reversed(pairs) for event in back])
        price.ops.append(
            [(op, _sum(there), _sum(back)) for op, (there, back) in zip(program.ops, pairs, strict=True)]
        )
        price.ahead.append(merged(price.forward[-1]))
        weights = [pricer.weight_seconds.get((index, position), 0.0) for index in range(len(pairs))]
        later = [pricer.later_seconds.get((index, position), 0.0) for index in range(len(pairs))]
        price.segments.append(cut_backward(program.ops, [b for _, b in pairs], weights, later, ready))
        price.busy.append(pricer.busy)
        price.alone.append(pricer.alone)
        price.crowded.append(pricer.crowded)
        pricer.busy = pricer.alone = pricer.crowded = 0.0
    price.variance /= max(1, program.width)
    price.fields.update(kernels.fields())
    return price


def _sum(events: Events) -> float:
    return sum(event.seconds for event in events)


class _Pricer:
    def __init__(
        self,
        program: StageProgram,
        machine: Machine,
        kernels: KernelTimes,
        ranks: tuple[int, ...],
        replicas: tuple[tuple[int, ...], ...],
        price: StagePrice,
        together: bool,
    ) -> None:
        self.program = program
        self.again = joins(program.ops, {held.slot for held in program.departures.values()})
        self.later_seconds: dict[tuple[int, int], float] = {}
        self.busy = self.alone = self.crowded = 0.0
        self.machine, self.kernels, self.ranks, self.price = machine, kernels, ranks, price
        self.replicas, self.together = replicas, together
        self.weight_seconds: dict[tuple[int, int], float] = {}
        self.sharing: dict[int, tuple[int, ...]] = {}
        self.sums: dict[tuple[int, float], float] = {}
        self.tiers: dict[tuple[int, int], Tier] = {}
        self.leaving: dict[int, Counter[int]] = {}

    def op(self, op: Op, rank: int, index: int) -> tuple[Events, Events]:
        """Return the forward and the backward events of one rank in one operation."""
        if isinstance(op, Regrid):
            return self._regrid(op, rank, index)
        if isinstance(op, Normalise):
            return self._normalise(op, rank, index)
        return self._compute(op, rank, index)

    def _kernel(self, task: Task, direction: Direction) -> float:
        return self._noted(self.kernels.seconds(task, direction))

    def _noted(self, estimate: Estimate) -> float:
        self.busy += estimate.seconds
        self.alone += estimate.seconds / estimate.alone
        self.crowded += estimate.seconds * estimate.crowded
        self.price.variance += estimate.spread**2
        if estimate.flag:
            self.price.flags.add(estimate.flag)
        return estimate.seconds

    def _compute(self, op: Compute, rank: int, index: int) -> tuple[Events, Events]:
        task, name = Task.of(op, rank), op.layer.name
        ahead, back = self._entering(index)
        there = Event(Kind.WORK, ahead + self._kernel(task, Direction.FORWARD), FORWARD, name)
        if not op.makes.grad:
            return (there,), ()
        value, weight = self._backward_seconds(op, task)
        self.weight_seconds[index, rank] = weight
        self.later_seconds[index, rank] = self._adding(op, rank)
        back += value + weight + self._joining(op, rank, index)
        return (there,), (Event(Kind.WORK, back, BACKWARD, name),)

    def _entering(self, index: int) -> tuple[float, float]:
        """Return the costs of entering and leaving the run of computations that begins here, if one does."""
        before = self.program.ops[index - 1] if index else None
        if isinstance(before, Compute):
            return 0.0, 0.0
        device = self.machine.device
        return device.overhead_segment_forward_seconds, device.overhead_segment_backward_seconds

    def _joining(self, op: Compute | Normalise, rank: int, index: int) -> float:
        """Return the seconds for adding gradients of values that something else reads too."""
        spec = op.makes.spec
        shapes = [op.reads[i].stored(rank).shape for i in self.again[index]]
        return sum(self._moving(sum_of(shape, spec.dtype, spec.itemsize)) for shape in shapes)

    def _adding(self, op: Compute | Normalise, rank: int) -> float:
        """Return the seconds for adding to the gradients of weights that are there already."""
        spec = op.makes.spec
        names = [o.source for o, r in zip(op.layer.operands, op.reads, strict=True) if r.grad]
        boxes = [self.program.parameters[n].box(rank) for n in names if n in self.program.parameters]
        return sum(self._moving(sum_of(box.shape, spec.dtype, spec.itemsize)) for box in boxes)

    def _moving(self, move: Move) -> float:
        return self._noted(self.kernels.moving(move)) if move.nbytes else 0.0

    def _backward_seconds(self, op: Compute | Normalise, task: Task) -> tuple[float, float]:
        """Return the seconds for the input's and the weights' gradient, where anybody wants them."""
        parameters = task.parameter_positions
        value = any(r.grad for i, r in enumerate(op.reads) if i not in parameters)
        weight = any(op.reads[i].grad for i in parameters)
        inputs = weights = 0.0
        if value or (weight and op.layer.kind not in WEIGHTED):
            inputs = self._kernel(task, Direction.BACKWARD_INPUT)
        if weight and op.layer.kind in WEIGHTED:
            weights = self._kernel(task, Direction.BACKWARD_WEIGHT)
        return inputs, weights

    def _normalise(self, op: Normalise, rank: int, index: int) -> tuple[Events, Events]:
        task, name = Task.of(op, rank), op.layer.name
        owned = op.owned.box(rank)
        # A sum of a loss over replicas has no channels; its few elements travel once.
        channels = owned.shape[1] if owned.ndim > 1 else owned.size
        own = rank if op.over != "group" else -1
        sharing = self._sharing(own)
        # Replicas that are not simulated do the same at the same time: they are not waited for.
        peers = sharing if self.together else self.ranks if own < 0 else ()
        # Sums travel in float64: three per channel forwards, two backwards; half of the work is before them.
        there = self._statistics(own, 3 * channels * 8)
        back = self._statistics(own, 2 * channels * 8)
        place = (index, own)
        forward = self._kernel(task, Direction.FORWARD)
        first = _reduced(forward, FORWARD, there, name, place, peers)
        if not op.makes.grad:
            return first, ()
        self.later_seconds[index, rank] = self._adding(op, rank)
        backward = sum(self._backward_seconds(op, task)) + self._joining(op, rank, index)
        return first, _reduced(backward, BACKWARD, back, name, place, peers)

    def _sharing(self, own: int) -> tuple[int, ...]:
        """Return all ranks that share statistics: everybody (-1), or one position of every replica."""
        if own not in self.sharing:
            groups = self.replicas
            self.sharing[own] = tuple(r for g in groups for r in (g if own < 0 else g[own : own + 1]))
        return self.sharing[own]

    def _statistics(self, own: int, nbytes: float) -> float:
        if (own, nbytes) not in self.sums:
            self.sums[own, nbytes] = self._all_reduce(self._sharing(own), nbytes)
        return self.sums[own, nbytes]

    def _all_reduce(self, ranks: Sequence[int], nbytes: float) -> float:
        if len(ranks) < 2:
            return 0.0
        tier = self.machine.tier(ranks)
        self._use(tier)
        return self.machine.sum_seconds(tier, len(ranks), nbytes)

    def _regrid(self, op: Regrid, rank: int, index: int) -> tuple[Events, Events]:
        itemsize, name = op.makes.spec.itemsize, op.why or op.makes.value
        if op.is_sum:
            # The runtime carries this regular case out as one collective on a copy.
            peers, seconds = self.ranks, self._all_reduce(self.ranks, op.makes.spec.nbytes)
        else:
            peers, seconds = self._exchange(op.messages_of(rank), rank, itemsize, self._flows(op, index))
        there = seconds + self._moving(move_of(op, rank))
        back = seconds + self._moving(move_of(op, rank, back=True))
        if self.again[index]:
            spec = op.source.spec
            back += self._moving(sum_of(op.source.stored(rank).shape, spec.dtype, spec.itemsize))
        forward = Event(Kind.MEET, there, HALO, name, (FORWARD, index), peers)
        backward = Event(Kind.MEET, back, HALO, name, (BACKWARD, index), peers)
        return (forward,), (backward,) if op.makes.grad else ()

    def _flows(self, op: Regrid, index: int) -> Counter[int]:
        """Return how many ranks of each node send to other nodes in an exchange, one parcel at a time."""
        if index not in self.leaving:
            ranks, span = self.ranks, self.machine.network[0].span
            pairs = ((ranks[m.source], ranks[m.target]) for m in op.messages if span)
            away = {a for a, b in pairs if self.machine.leaves_node(a, b)}
            self.leaving[index] = Counter(rank // span for rank in away)
        return self.leaving[index]

    def _exchange(
        self, messages: Sequence[Message], rank: int, itemsize: int, leaving: Counter[int]
    ) -> tuple[tuple[int, ...], float]:
        """Return with whom a rank exchanges and for how long: one parcel per peer, both ways at once."""
        traffic: dict[int, list[int]] = {}
        for message in messages:
            if message.source == message.target:
                continue
            peer = message.target if message.source == rank else message.source
            sent = traffic.setdefault(peer, [0, 0])
            sent[message.target == rank] += message.box.size * itemsize
        seconds = 0.0
        for peer, (out, arriving) in traffic.items():
            tier = self._tier(self.ranks[rank], self.ranks[peer])
            both = out > 0 and arriving > 0
            larger = max(out, arriving)
            mine, other = self.ranks[rank], self.ranks[peer]
            away = self.machine.leaves_node(mine, other)
            flows = leaving[mine // self.machine.network[0].span] if away else 1
            exchange = self.machine.exchange_seconds
            seconds += exchange(tier, larger, flows) if both else tier.message_seconds(larger, flows)
        return tuple(self.ranks[peer] for peer in traffic), seconds

    def _tier(self, one: int, other: int) -> Tier:
        """Return the tier between two ranks; the same pairs exchange at every layer."""
        if (one, other) not in self.tiers:
            self.tiers[one, other] = self.machine.tier((one, other))
            self._use(self.tiers[one, other])
        return self.tiers[one, other]

    def _use(self, tier: Tier) -> None:
        self.price.fields |= tier_fields(tier)


def _reduced(
    seconds: float, category: str, reduce: float, name: str, place: tuple[int, int], peers: tuple[int, ...]
) -> Events:
    half = Event(Kind.WORK, seconds / 2, category, name)
    return (half, Event(Kind.MEET, reduce, STATISTICS, name, (category, *place), peers), half)


def tier_fields(tier: Tier) -> set[str]:
    """Return the fields that a message over this tier is priced from."""
    name = f"tiers.{tier.name}"
    link = {f"{name}.point_to_point.latency_seconds", f"{name}.point_to_point.bytes_per_second"}
    return link | {f"{name}.links", f"{name}.overlap"}
