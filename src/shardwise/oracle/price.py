"""Price a lowered stage: every operation of every rank becomes an event with its seconds.

What is priced is the program that the runtime executes and the message lists that it sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwise.geometry import Message
from shardwise.machine import Machine, Tier
from shardwise.oracle.events import Event, Kind
from shardwise.oracle.kernels import WEIGHTED, Direction, Estimate, KernelTimes, Task
from shardwise.oracle.moves import Move, joins, move_of, sum_of
from shardwise.oracle.segments import Done, Events, Segment, backward_runs, cut_backward, last_uses, merged
from shardwise.oracle.stage_price import StagePrice
from shardwise.program import Compute, Normalise, Op, Regrid, StageProgram

FORWARD, BACKWARD, HALO, STATISTICS = "forward", "backward", "halo", "statistics"


def price_stage(
    program: StageProgram,
    machine: Machine,
    kernels: KernelTimes,
    *,
    ranks: Sequence[int] | None = None,
    replicas: Sequence[Sequence[int]] = (),
    together: bool = False,
    computed: dict[int, list[Done]] | None = None,
) -> StagePrice:
    """Return the events of one micro-batch's forward and backward pass through a stage.

    Args:
        program: the lowered stage.
        machine: for the times of messages.
        kernels: for the times of computations.
        ranks: the world rank of each position in the group; default 0, 1, ...
        replicas: the same for every data replica, this one included; statistics are shared with them.
        together: whether the replicas are simulated too, so that these are waited for.
        computed: what is done in computations without communication, the same on any ranks; it is filled.
    """
    world = tuple(ranks) if ranks is not None else tuple(range(program.width))
    price = StagePrice(program.width, world, program.ops)
    groups = tuple(map(tuple, replicas)) or (world,)
    pricer = _Pricer(program, machine, kernels, world, groups, price, together)
    pricer.computed = computed if computed is not None else {}
    runs = backward_runs(program.ops, last_uses(program.ops))
    work = [pricer.op(op, index) for index, op in enumerate(program.ops)]
    known: dict[tuple[int, ...], Segment] = {}
    for mine in zip(*work, strict=True) if work else [()] * program.width:
        price.done.append(mine)
        price.ahead.append(merged([event for done in mine for event in done.there]))
        price.segments.append(cut_backward(runs, mine, known))
        noted = [estimate for done in mine for estimate in done.noted]
        price.busy.append(sum([e.seconds for e in noted]))
        price.alone.append(sum([e.seconds / e.alone for e in noted]))
        price.crowded.append(sum([e.seconds * e.crowded for e in noted]))
        price.variance = sum([e.spread**2 for e in noted], price.variance)
    price.variance /= max(1, program.width)
    price.fields.update(kernels.fields())
    return price


# With whom a rank meets, the seconds there and back, and the copies among them.
_Parts = tuple[tuple[int, ...], float, float, tuple[Estimate, ...]]


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
        self.noted: list[Estimate] = []
        self.computed: dict[int, list[Done]] = {}
        self.regrids: dict[tuple[object, ...], list[_Parts]] = {}
        self.machine, self.kernels, self.ranks, self.price = machine, kernels, ranks, price
        self.replicas, self.together = replicas, together
        self.sharing: dict[int, tuple[int, ...]] = {}
        self.sums: dict[tuple[int, float], float] = {}
        self.span = machine.network[0].span
        self.tiers: dict[tuple[int, int], tuple[Tier, bool]] = {}
        self.parcels: dict[tuple[object, ...], float] = {}

    def op(self, op: Op, index: int) -> list[Done]:
        """Return what each rank does in one operation; those that do the same share it."""
        if isinstance(op, Regrid):
            return self._regrid(op, index)
        if index in self.computed:
            self.price.flags |= {e.flag for done in self.computed[index] for e in done.noted if e.flag}
            return self.computed[index]
        found: dict[int, Done] = {}
        for ranks in op.kinds:
            if isinstance(op, Normalise):
                found |= self._normalise(op, ranks, index)
            else:
                found |= dict.fromkeys(ranks, self._compute(op, ranks[0], index))
        result = [found[rank] for rank in range(self.program.width)]
        if isinstance(op, Compute):
            self.computed[index] = result
        return result

    def _kernel(self, task: Task, direction: Direction) -> float:
        return self._noted(self.kernels.seconds(task, direction))

    def _noted(self, estimate: Estimate) -> float:
        self.noted.append(estimate)
        if estimate.flag:
            self.price.flags.add(estimate.flag)
        return estimate.seconds

    def _taken(self) -> tuple[Estimate, ...]:
        """Return what was noted since the last time."""
        noted, self.noted = tuple(self.noted), []
        return noted

    def _compute(self, op: Compute, rank: int, index: int) -> Done:
        task, name = Task.of(op, rank), op.layer.name
        ahead, back = self._entering(index)
        there = Event(Kind.WORK, ahead + self._kernel(task, Direction.FORWARD), FORWARD, name)
        if not op.makes.grad:
            return Done((there,), noted=self._taken())
        value, weight = self._backward_seconds(op, task)
        later = self._adding(op, rank)
        back += value + weight + self._joining(op, rank, index)
        return Done((there,), (Event(Kind.WORK, back, BACKWARD, name),), weight, later, self._taken())

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

    def _normalise(self, op: Normalise, ranks: Sequence[int], index: int) -> dict[int, Done]:
        task, owned = Task.of(op, ranks[0]), op.owned.box(ranks[0])
        # A sum of a loss over replicas has no channels; its few elements travel once.
        channels = owned.shape[1] if owned.ndim > 1 else owned.size
        forward, backward, later = self._kernel(task, Direction.FORWARD), 0.0, 0.0
        if op.makes.grad:
            later = self._adding(op, ranks[0])
            backward = sum(self._backward_seconds(op, task)) + self._joining(op, ranks[0], index)
        noted = self._taken()

        def done(own: int) -> Done:
            there, back = self._statistics_of(op, own, channels, index, forward, backward)
            return Done(there, back, 0.0, later, noted)

        if op.over == "group":
            return dict.fromkeys(ranks, done(-1))
        return {rank: done(rank) for rank in ranks}

    def _statistics_of(
        self, op: Normalise, own: int, channels: int, index: int, forward: float, backward: float
    ) -> tuple[Events, Events]:
        """Return the events of a normalisation around the sums that it shares."""
        sharing = self._sharing(own)
        # Replicas that are not simulated do the same at the same time: they are not waited for.
        peers = sharing if self.together else self.ranks if own < 0 else ()
        # Sums travel in float64: three per channel forwards, two backwards; half of the work is before them.
        there = self._statistics(own, 3 * channels * 8)
        back = self._statistics(own, 2 * channels * 8)
        place, name = (index, own), op.layer.name
        first = _reduced(forward, FORWARD, there, name, place, peers)
        if not op.makes.grad:
            return first, ()
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

    def _regrid(self, op: Regrid, index: int) -> list[Done]:
        """Return the meetings of a regrid; between equal layouts they take equally long."""
        spec, name = op.makes.spec, op.why or op.makes.value
        again = bool(self.again[index])
        key = (
            *(op.source.layout, op.source.margins, op.makes.layout, op.makes.margins),
            *(op.source.spec.dtype, spec, op.landing, again),
        )
        if key not in self.regrids:
            flows = Counter[int]() if op.is_sum else self._flows(op)
            self.regrids[key] = [self._parts(op, rank, flows, again) for rank in range(self.program.width)]
        result = []
        for peers, there, back, noted in self.regrids[key]:
            forward = Event(Kind.MEET, there, HALO, name, (FORWARD, index), peers)
            backward = Event(Kind.MEET, back, HALO, name, (BACKWARD, index), peers)
            result.append(Done((forward,), (backward,) if op.makes.grad else (), noted=noted))
        return result

    def _parts(self, op: Regrid, rank: int, flows: Counter[int], again: bool) -> _Parts:
        """Return with whom a rank meets in a regrid, for how long there and back, and what it copies."""
        if op.is_sum:
            # The runtime carries this regular case out as one collective on a copy.
            peers, seconds = self.ranks, self._all_reduce(self.ranks, op.makes.spec.nbytes)
        else:
            peers, seconds = self._exchange(op.messages_of(rank), rank, op.makes.spec.itemsize, flows)
        there = seconds + self._moving(move_of(op, rank))
        back = seconds + self._moving(move_of(op, rank, back=True))
        if again:
            spec = op.source.spec
            back += self._moving(sum_of(op.source.stored(rank).shape, spec.dtype, spec.itemsize))
        return peers, there, back, self._taken()

    def _flows(self, op: Regrid) -> Counter[int]:
        """Return how many ranks of each node send to other nodes in an exchange, one parcel at a time."""
        ranks, span = self.ranks, self.span
        pairs = {(m.source, m.target) for m in op.messages if span and m.source != m.target}
        away = {ranks[a] for a, b in pairs if self._tier(ranks[a], ranks[b])[1]}
        return Counter(rank // span for rank in away)

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
            tier, away = self._tier(self.ranks[rank], self.ranks[peer])
            both = out > 0 and arriving > 0
            larger = max(out, arriving)
            flows = leaving[self.ranks[rank] // self.span] if away else 1
            key = (tier.name, larger, flows, both)
            if key not in self.parcels:
                exchange = self.machine.exchange_seconds
                found = exchange(tier, larger, flows) if both else tier.message_seconds(larger, flows)
                self.parcels[key] = found
            seconds += self.parcels[key]
        return tuple(self.ranks[peer] for peer in traffic), seconds

    def _tier(self, one: int, other: int) -> tuple[Tier, bool]:
        """Return the tier between two ranks, and whether it leaves the node; the same pairs meet again."""
        if (one, other) not in self.tiers:
            tier = self.machine.tier((one, other))
            self.tiers[one, other] = tier, self.machine.leaves_node(one, other)
            self._use(tier)
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
