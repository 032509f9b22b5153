"""Build the program of a plan: the schedule's computations, with the messages that the edges call for.

    FORWARD    is preceded by a RECEIVE for every edge into the stage and followed by a SEND for every edge
               out of it
    BACKWARD   is preceded by a RECEIVE_GRAD for every differentiable edge out of the stage and followed by
               a SEND_GRAD for every one into it
    REDUCE     comes once for every stage that the rank holds, right after its last backward there (the
               last of both directions), but never before the REDUCE of a later stage
    STEP       ends the list

Later stages end their backward first, on the last of their ranks too, so the order of REDUCEs costs no
time; and with one order everywhere the sums may even share a communicator. A REDUCE never waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from shardwise.plan import Edge, Mesh, Plan, direction_of, mesh_of, micro_batches_of
from shardwise.program.actions import Act, Action, Program
from shardwise.program.schedules import orders


def build(plan: Plan, edges: Iterable[Edge] = (), *, training: bool = True) -> Program:
    """Return the program of a plan.

    Args:
        plan: how the network is split.
        edges: the values that cross between stages, as `stage_edges` finds them.
        training: a whole training step, or only the forward passes of the same micro-batches.
    """
    mesh = mesh_of(plan)
    order = orders(plan, mesh) if training else _forwards(plan, mesh)
    return _program(plan, mesh, edges, order, training=training)


def _forwards(plan: Plan, mesh: Mesh) -> Sequence[Sequence[Action]]:
    """Pass all micro-batches through in the order of their numbers."""
    directions = [direction_of(plan, m) for m in range(micro_batches_of(plan))]
    result = []
    for position in range(mesh.positions):
        stages = {role.direction: role.stage for role in mesh.roles(position)}
        result.append([Action(Act.FORWARD, stages[d], m, d) for m, d in enumerate(directions)])
    return result


def _program(
    plan: Plan, mesh: Mesh, edges: Iterable[Edge], order: Sequence[Sequence[Action]], *, training: bool
) -> Program:
    edges = tuple(sorted(edges, key=lambda edge: (edge.source, edge.target)))
    lists: dict[tuple[int, ...], tuple[Action, ...]] = {}
    actions = []
    for position in range(mesh.positions):
        # Positions with the same stages do the same, so they share one list.
        stages = tuple(role.stage for role in mesh.roles(position))
        if stages not in lists:
            lists[stages] = tuple(_messages(_ends(order[position], training), edges))
        actions.append(lists[stages])
    return Program(
        mesh.stages,
        mesh.widths,
        mesh.data,
        micro_batches_of(plan),
        plan.schedule,
        edges,
        tuple(actions),
        mesh.bidirectional,
        training,
    )


def _ends(order: Sequence[Action], training: bool) -> Iterator[Action]:
    """Add the REDUCEs and the STEP."""
    if not training:
        yield from order
        return
    last = {action.stage: i for i, action in enumerate(order) if action.act is not Act.FORWARD}
    waiting = sorted(last, reverse=True)
    for i, action in enumerate(order):
        yield action
        while waiting and last[waiting[0]] <= i:
            yield Action(Act.REDUCE, waiting.pop(0))
    yield Action(Act.STEP)


def _messages(order: Iterable[Action], edges: Sequence[Edge]) -> Iterator[Action]:
    """Add the messages around every computation."""
    into: dict[int, list[Edge]] = defaultdict(list)
    out: dict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        into[edge.target].append(edge)
        out[edge.source].append(edge)
    for action in order:
        if action.act is Act.FORWARD:
            yield from _of(Act.RECEIVE, action, into[action.stage])
            yield action
            yield from _of(Act.SEND, action, out[action.stage])
        elif action.act is Act.BACKWARD:
            yield from _of(Act.RECEIVE_GRAD, action, out[action.stage])
            yield action
            yield from _of(Act.SEND_GRAD, action, into[action.stage])
        else:
            yield action


def _of(act: Act, action: Action, edges: Iterable[Edge]) -> Iterator[Action]:
    for edge in edges:
        if edge.differentiable or act in (Act.RECEIVE, Act.SEND):
            yield Action(act, action.stage, action.micro_batch, action.direction, edge)
