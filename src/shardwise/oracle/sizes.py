"""The bytes of everything that a stage holds and moves, of all of its ranks at once.

What each operation makes, keeps and lets go is the same on every rank; only the sizes differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.geometry import Box
from shardwise.graph import Source
from shardwise.oracle.kernels import Direction, KernelTimes, Task
from shardwise.program import Compute, Held, Normalise, Op, Regrid, StageProgram

Place = tuple[str, int]
"""A slot, and the number of the column that has its bytes on every rank."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Of a regrid: on which ranks it leaves the tile where it was made, and where it holds all of that."""

    lands: Sequence[bool]
    widens: Sequence[bool]


@dataclass(frozen=True, slots=True)
class Step:
    """What one operation does to memory.

    Args:
        makes, values: the activation that it makes, and those that it reads.
        flows: those of them that have gradients.
        keeps: those that autograd keeps.
        unnamed, whole, elements: bytes that it keeps under no name, in proportion to the elements of its
            output: of the whole, and of each rank.
        parameters: names of those that it reads.
        room: what it allocates on each rank at its fullest moment, forwards and backwards.
        dying: slots that nobody reads after it.
        view: whether its output shares the memory of what it reads.
        plain: whether it is a computation without communication.
        moves: of a regrid.
    """

    makes: Place
    values: tuple[Place, ...]
    flows: tuple[Place, ...]
    keeps: tuple[Place, ...]
    unnamed: int
    whole: int
    elements: tuple[int, ...]
    parameters: tuple[str, ...]
    room: Sequence[tuple[float, float]]
    dying: Sequence[str]
    view: bool
    plain: bool
    moves: Moves | None = None


class Sizes:
    """What the operations of a stage do to the memory of its ranks.

    Args:
        program: the lowered stage.
        kernels: know what room computations take beyond their results.
        host: whether passes over tensors are compiled.
    """

    def __init__(self, program: StageProgram, kernels: KernelTimes | None = None, host: bool = True) -> None:
        self.width, self.kernels, self.host = program.width, kernels, host
        self.columns: list[tuple[int, ...]] = []
        self._known: dict[tuple[object, ...], int] = {}
        self._moved: dict[tuple[object, ...], tuple[Moves, tuple[int, ...]]] = {}
        self._nothing = ((0.0, 0.0),) * program.width
        self.arrivals = [self._place(held) for held in program.arrivals.values()]
        self.departures = [self._place(held) for held in program.departures.values()]
        self.weights, self.trained = self._stored(program)
        dying = _dying(program)
        self.steps = [self._step(op, dying.get(i, ())) for i, op in enumerate(program.ops)]
        parcels = [
            [size * op.makes.spec.itemsize for size in self._moves(op)[1]]
            for op in program.ops
            if isinstance(op, Regrid) and not op.is_sum
        ]
        # The packed parcels of all exchanges use the same memory.
        self.parcels = [max(mine) for mine in zip(*parcels, strict=True)] or [0] * program.width

    def keys(self) -> Iterator[tuple[object, ...]]:
        """Yield what the memory of every rank depends on: equal for those that hold as much of everything."""
        several = [s for s in self.steps if s.room is not self._nothing or s.moves or s.unnamed]
        columns: list[Sequence[object]] = [*self.columns, self.parcels]
        for step in several:
            columns += [step.room, step.elements]
            columns += [step.moves.lands, step.moves.widens] if step.moves else []
        return zip(*columns, strict=True)

    def _place(self, held: Held) -> Place:
        # Layouts live as long as the program, so they can be told apart by identity.
        return held.slot, self._column(held, held.spec.itemsize)

    def _column(self, held: Held, itemsize: int) -> int:
        key = (id(held.layout), held.margins, itemsize)
        if key not in self._known:
            sizes: Sequence[int] = held.layout.sizes
            if held.margins is not None:
                sizes = [held.stored(rank).size for rank in range(self.width)]
            self._known[key] = len(self.columns)
            self.columns.append(tuple(size * itemsize for size in sizes))
        return self._known[key]

    def _stored(self, program: StageProgram) -> tuple[list[int], list[Place]]:
        """Return the columns of all parameters and buffers, and those of the parameters that are trained."""
        weights: dict[tuple[bool, str], int] = {}
        trained: dict[str, int] = {}
        for op in program.ops:
            if isinstance(op, Regrid):
                continue
            for operand, held in zip(op.layer.operands, op.reads, strict=True):
                if operand.origin is not Source.VALUE:
                    own = operand.origin is Source.PARAMETER
                    column = self._column(held, operand.spec.itemsize)
                    weights[own, operand.source] = column
                    if own and held.grad:
                        trained[operand.source] = column
        return list(weights.values()), list(trained.items())

    def _step(self, op: Op, dying: Sequence[str]) -> Step:
        values = tuple(self._place(held) for held in _values(op))
        makes = self._place(op.makes)
        flows = tuple(
            p for p, held in zip((makes, *values), (op.makes, *_values(op)), strict=True) if held.grad
        )
        if isinstance(op, Regrid):
            elements, moves = op.makes.layout.sizes, self._moves(op)[0]
            return Step(
                makes, values, flows, (), 0, 1, elements, (), self._nothing, dying, False, False, moves
            )
        keeps, unnamed = self._keeps(op)
        return Step(
            makes,
            values,
            flows,
            keeps,
            unnamed,
            max(1, op.makes.spec.numel),
            op.makes.layout.sizes,
            op.layer.parameters,
            self._room(op),
            dying,
            isinstance(op, Compute) and bool(op.layer.alias),
            isinstance(op, Compute),
        )

    def _keeps(self, op: Compute | Normalise) -> tuple[tuple[Place, ...], int]:
        """Return the values that an operation keeps for backward, and the bytes that it keeps beyond them."""
        if not op.makes.grad:
            return (), 0
        names = set(op.layer.saves)
        if isinstance(op, Normalise):
            # A norm that rectifies looks at its result again where passes are not compiled.
            alone = self.host or not op.rectifies
            names = {op.reads[0].value} if alone else {op.reads[0].value, op.makes.value}
        keeps = tuple(self._place(held) for held in (*_values(op), op.makes) if held.value in names)
        if isinstance(op, Normalise):
            return keeps, 0
        specs = {o.source: o.spec for o in op.layer.operands} | {op.layer.name: op.makes.spec}
        named = sum([specs[name].nbytes for name in names if name in specs])
        # What has no name of its own (indices of a pooling, masks) is cut as the output is.
        return keeps, max(0, op.layer.saved_bytes - named)

    def _room(self, op: Compute | Normalise) -> Sequence[tuple[float, float]]:
        """Return what an operation allocates on each rank at its fullest moment, forwards and backwards."""
        if self.kernels is None:
            return self._nothing
        result = list(self._nothing)
        for ranks in op.kinds:
            task = Task.of(op, ranks[0])
            if not task.out.empty:
                back = self.kernels.room(task, Direction.BACKWARD_INPUT) if op.makes.grad else 0.0
                both = self.kernels.room(task, Direction.FORWARD), back
                for rank in ranks:
                    result[rank] = both
        return result if any(map(any, result)) else self._nothing

    def _moves(self, op: Regrid) -> tuple[Moves, tuple[int, ...]]:
        """Return where a regrid leaves what it holds, and how many elements each rank sends and receives."""
        held, makes = op.source.layout, op.makes
        key = (id(held), id(makes.layout), makes.margins, op.landing)
        if key not in self._moved:
            own: dict[int, list[Box]] = {}
            travelling = [0] * self.width
            for message in op.messages:
                if message.source == message.target:
                    own.setdefault(message.source, []).append(message.box)
                else:
                    size = message.box.size
                    travelling[message.source] += size
                    travelling[message.target] += size
            widens = [op.widens(rank) for rank in range(self.width)]
            lands = [
                op.landing and own.get(rank) == [held.box(rank)] and widens[rank]
                for rank in range(self.width)
            ]
            self._moved[key] = Moves(lands, widens), tuple(travelling)
        return self._moved[key]


def _dying(program: StageProgram) -> Mapping[int, list[str]]:
    """Return for each operation the slots that nobody reads after it."""
    last = {held.slot: -1 for held in program.arrivals.values()}
    for i, op in enumerate(program.ops):
        for held in _values(op):
            last[held.slot] = i
    for held in program.departures.values():
        last[held.slot] = len(program.ops)
    result: dict[int, list[str]] = {}
    for slot, i in last.items():
        result.setdefault(i, []).append(slot)
    return result


def _values(op: Op) -> tuple[Held, ...]:
    """Return the activations that an operation reads."""
    if isinstance(op, Regrid):
        return (op.source,)
    pairs = zip(op.layer.operands, op.reads, strict=True)
    return tuple([held for operand, held in pairs if operand.origin is Source.VALUE])
