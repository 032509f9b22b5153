"""Part two: both ends of every message exist, groups act alike, and sums have one common order."""

from __future__ import annotations

import itertools
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

from shardwise.plan import Direction, Edge
from shardwise.program.actions import COMPUTE, Act, Action, Program
from shardwise.program.errors import ProgramError
from shardwise.program.proof.local import mesh_of_program

_OTHER_END = {
    Act.SEND: Act.RECEIVE,
    Act.RECEIVE: Act.SEND,
    Act.SEND_GRAD: Act.RECEIVE_GRAD,
    Act.RECEIVE_GRAD: Act.SEND_GRAD,
}


def prove_matching(program: Program) -> None:
    """Check the lists of all ranks against each other, without running them."""
    sets = {id(actions): frozenset(actions) for actions in program.actions}
    has = [sets[id(actions)] for actions in program.actions]
    _messages(program, has)
    _groups(program)
    _sums(program, has)


def _messages(program: Program, has: list[frozenset[Action]]) -> None:
    mesh = mesh_of_program(program)
    groups: dict[tuple[int, Direction], tuple[int, ...]] = {
        (s, d): mesh.member_positions(s, d) for s in range(mesh.stages) for d in mesh.directions
    }
    # Ranks of the peer group that share a list object need to be looked at once per list.
    lists = {
        key: tuple({id(program.actions[p]): p for p in reversed(members)}.values())
        for key, members in groups.items()
    }
    firsts = {id(program.actions[rank]): rank for rank in reversed(range(program.ranks))}
    for rank in sorted(firsts.values()):
        for action in program.actions[rank]:
            if action.edge is None:
                continue
            end = _end(action, action.edge)
            for peer in lists[end.stage, end.direction]:
                if end not in has[peer]:
                    reason = f"has no {end.act} {end} to match it"
                    raise ProgramError(rank, action, f"rank {peer} {reason}", peer)


def _end(action: Action, edge: Edge) -> Action:
    """Return what the peers of a message do at its other end."""
    stage = edge.target if action.stage == edge.source else edge.source
    return Action(_OTHER_END[action.act], stage, action.micro_batch, action.direction, edge)


def _groups(program: Program) -> None:
    """Check that all ranks of a group compute the same, in the same order, and all that there is."""
    mesh = mesh_of_program(program)
    passed: dict[int, set[tuple[int, Direction]]] = defaultdict(set)
    for stage, direction in itertools.product(range(mesh.stages), mesh.directions):
        first, *others = mesh.member_positions(stage, direction)
        wanted = _computations(program, first, stage, direction)
        known = {id(program.actions[first]): wanted}
        for rank in others:
            key = id(program.actions[rank])
            if key not in known:
                known[key] = _computations(program, rank, stage, direction)
            if known[key] != wanted:
                pairs = itertools.zip_longest(wanted, known[key])
                mine, theirs = next((a, b) for a, b in pairs if a != b)
                reason = f"computes {theirs or 'nothing'} where its group computes {mine or 'nothing'}"
                raise ProgramError(rank, theirs or mine, reason, first)
        for action in wanted:
            if action.act is Act.FORWARD:
                passed[action.micro_batch].add((stage, direction))
    for micro_batch in range(program.micro_batches):
        _whole(program, micro_batch, passed[micro_batch])


def _whole(program: Program, micro_batch: int, passed: set[tuple[int, Direction]]) -> None:
    """Check that a micro-batch passes through every stage, in one direction."""
    directions = sorted({direction for _, direction in passed}) or [Direction.DOWN]
    wanted = {(stage, directions[0]) for stage in range(program.stages)}
    for stage, direction in sorted(wanted ^ passed):
        action = Action(Act.FORWARD, stage, micro_batch, direction)
        rank = mesh_of_program(program).member_positions(stage, direction)[0]
        raise ProgramError(rank, action, "missing, or in a second direction")


def _computations(program: Program, rank: int, stage: int, direction: Direction) -> list[Action]:
    """Return what a rank computes of one stage in one direction."""
    found = (a for a in program.actions[rank] if a.act in COMPUTE and a.stage == stage)
    return [a for a in found if a.direction is direction]


def _sums(program: Program, has: list[frozenset[Action]]) -> None:
    """Check that all holders of a stage reduce it, and that no two ranks disagree about the order."""
    if not program.training:
        return
    mesh = mesh_of_program(program)
    for stage in range(mesh.stages):
        action = Action(Act.REDUCE, stage)
        holders = mesh.holders(stage)
        for rank in holders:
            if action not in has[rank]:
                peer = next((p for p in holders if p != rank), None)
                raise ProgramError(rank, action, "missing; others that hold the stage wait for it", peer)
    order: TopologicalSorter[int] = TopologicalSorter()
    for actions in {id(actions): actions for actions in program.actions}.values():
        reduced = [a.stage for a in actions if a.act is Act.REDUCE]
        for earlier, later in itertools.pairwise(reduced):
            order.add(later, earlier)
    try:
        order.prepare()
    except CycleError as error:
        first, second = error.args[1][:2]
        here = _rank_with(program, first, second) or 0
        reason = f"stage {first} is reduced before stage {second} here, but after it by way of other ranks"
        peer = _rank_with(program, second, first)
        raise ProgramError(here, Action(Act.REDUCE, second), reason, peer) from error


def _rank_with(program: Program, first: int, second: int) -> int | None:
    """Return a rank that reduces one stage before the other."""
    for rank, actions in enumerate(program.actions):
        reduced = [a.stage for a in actions if a.act is Act.REDUCE]
        if first in reduced and second in reduced and reduced.index(first) < reduced.index(second):
            return rank
    return None
