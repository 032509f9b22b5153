"""What to measure: the operations of a stage in their order, since each finds what the last one left."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.graph import Call, Source
from shardwise.oracle.kernels import Task
from shardwise.oracle.moves import Move, joins, move_of, sum_of, update_of
from shardwise.oracle.profile import Profile, key_of
from shardwise.program import Compute, Normalise, Op, Regrid, StageProgram
from shardwise.runtime.in_place import overwriting
from shardwise.runtime.rules import bind

# Something before a computation, so that caches are as they are in a step.
_LEAD = 2


@dataclass(frozen=True)
class Chain:
    """Operations of one rank of a stage, in order, in a form that can be sent to another process.

    Args:
        program: the stage; only operations of this chain are in it.
        rank: position in the group.
        ops: what is executed and timed.
        again: for each of them, which of its reads get a second gradient in the whole stage.
        overwrites: positions of those that overwrite what they read, as in the whole stage.
    """

    program: StageProgram
    rank: int
    ops: tuple[Op, ...]
    again: tuple[tuple[int, ...], ...]
    overwrites: frozenset[int] = frozenset()

    @staticmethod
    def whole(program: StageProgram, rank: int) -> Chain:
        """Return all operations of a rank."""
        overwrites = frozenset(overwriting(program, rank))
        return Chain(program, rank, program.ops, _again(program), overwrites)

    def keys(self) -> dict[str, Task | Move]:
        """Return everything that a run of the chain measures."""
        return _keys_of(self.program, self.rank, self.ops, self.again)

    @property
    def is_lone(self) -> bool:
        """Tell whether a rank has the chain for itself, while others are at other stages of a pipeline."""
        program = self.program
        reads = any(held.grad for held in program.arrivals.values())
        # A whole network ends in a loss.
        hands_on = reads or any(held.spec.shape for held in program.departures.values())
        return hands_on and program.width == 1 and all(isinstance(op, Compute) for op in self.ops)

    @property
    def stored_bytes(self) -> dict[tuple[str, tuple[int, ...]], float]:
        """Return the bytes of all weights, their gradients and the optimizer's memory, by name and shape."""
        held = self.program.parameters
        boxes = {
            (operand.source, held[operand.source].box(self.rank).shape): operand.spec.itemsize
            for op in self.ops
            if not isinstance(op, Regrid)
            for operand in op.layer.operands
            if operand.source in held
        }
        return {key: 3.0 * itemsize * math.prod(key[1]) for key, itemsize in boxes.items()}


def sharing(chains: Sequence[Chain], limit: float) -> list[list[int]]:
    """Put chains into groups, in order, that fit into memory at once; they share what weights they can."""
    groups: list[list[int]] = []
    used: dict[tuple[str, tuple[int, ...]], float] = {}
    for i, chain in enumerate(chains):
        more = used | chain.stored_bytes
        if not groups or sum(more.values()) > limit:
            groups.append([])
            more = chain.stored_bytes
        groups[-1].append(i)
        used = more
    return groups


def _again(program: StageProgram) -> tuple[tuple[int, ...], ...]:
    return tuple(joins(program.ops, {held.slot for held in program.departures.values()}))


def _keys_of(
    program: StageProgram, rank: int, ops: Iterable[Op], again: Iterable[tuple[int, ...]]
) -> dict[str, Task | Move]:
    """Return the computations, copies and additions of some operations of a rank, by key."""
    found: dict[str, Task | Move] = {}
    for op, second in zip(ops, again, strict=True):
        if isinstance(op, Regrid):
            moves = [move_of(op, rank)] + ([move_of(op, rank, back=True)] if op.makes.grad else [])
            if second:
                spec = op.source.spec
                moves.append(sum_of(op.source.stored(rank).shape, spec.dtype, spec.itemsize))
            found |= {move.key: move for move in moves if move.nbytes}
            continue
        task = Task.of(op, rank)
        if not task.out.empty:
            found[key_of(task)] = task
        sums = [op.reads[i].stored(rank).shape for i in second]
        for operand, held in zip(op.layer.operands, op.reads, strict=True):
            if operand.origin is Source.PARAMETER and held.grad:
                sums.append(program.parameters[operand.source].box(rank).shape)
                update = update_of(sums[-1], operand.spec.dtype, operand.spec.itemsize)
                if update is not None:
                    found[update.key] = update
        for shape in sums:
            move = sum_of(shape, op.makes.spec.dtype, op.makes.spec.itemsize)
            if move.nbytes:
                found[move.key] = move
    return found


def chains_of(
    programs: Iterable[StageProgram], profile: Profile, crowded: bool = False
) -> tuple[list[Chain], dict[str, str]]:
    """Return chains that together measure all that a profile lacks, and why the rest cannot be measured.

    What was measured, but not with more ranks than cores, is lacking where ranks will be `crowded`.
    """
    result: list[Chain] = []
    planned: set[str] = set()
    refused: dict[str, str] = {}
    for program in programs:
        again = _again(program)
        for rank in range(program.width):
            keys = [
                _keys_of(program, rank, (op,), (second,))
                for op, second in zip(program.ops, again, strict=True)
            ]
            absent = [
                i
                for i, mine in enumerate(keys)
                if any(not profile.knows(k, crowded) and k not in planned for k in mine)
            ]
            if not absent:
                continue
            window = range(max(0, absent[0] - _LEAD), _behind(program.ops, absent[-1]))
            overwrites = overwriting(program, rank)
            chosen: list[tuple[Op, tuple[int, ...], bool]] = []
            for i in window:
                sent, reason = _portable(program.ops[i], rank)
                if sent is None:
                    refused |= dict.fromkeys(keys[i], reason)
                else:
                    chosen.append((sent, again[i], i in overwrites))
                planned |= set(keys[i])
            bare = dataclasses.replace(program, ops=(), frozen=frozenset())
            ops, seconds = tuple(op for op, _, _ in chosen), tuple(second for _, second, _ in chosen)
            places = frozenset(i for i, (_, _, overwrites_it) in enumerate(chosen) if overwrites_it)
            result.append(Chain(bare, rank, ops, seconds, places))
    return result, refused


def _behind(ops: Sequence[Op], last: int) -> int:
    """Return where a chain ends: what is made inside the result of a regrid is measured with that."""
    end = ops[last]
    if not isinstance(end, Regrid) and end.landing:
        slots = [op.source.slot if isinstance(op, Regrid) else "" for op in ops]
        last = slots.index(end.makes.slot)
    return last + 1


def _portable(op: Op, rank: int) -> tuple[Op | None, str]:
    """Return an operation in a form that can be sent to another process, or None and the reason.

    Some of torch's functions cannot be sent; that only matters for operators without an execution rule.
    """
    if isinstance(op, Regrid):
        return op, ""
    call = op.layer.call
    if call is not None:
        call = Call(call.target, call.args, dict(call.kwargs))
        try:
            pickle.dumps(call)
        except (AttributeError, TypeError, pickle.PicklingError):
            call = None
    layer = dataclasses.replace(op.layer, attributes=dict(op.layer.attributes), call=call)
    sent: Compute | Normalise = dataclasses.replace(op, layer=layer)
    if isinstance(sent, Compute):
        try:
            bind(sent, rank)
        except (ValueError, KeyError) as error:
            return None, str(error)
    return sent, ""
