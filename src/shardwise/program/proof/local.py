"""Part one: every rank's own list is complete, and in an order in which all is there in time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardwise.plan import Direction, Edge, Mesh
from shardwise.program.actions import COMPUTE, Act, Action, Program
from shardwise.program.errors import ProgramError

_END = {
    Act.RECEIVE: "target",
    Act.SEND: "source",
    Act.RECEIVE_GRAD: "source",
    Act.SEND_GRAD: "target",
}
_INFERENCE = frozenset({Act.RECEIVE, Act.FORWARD, Act.SEND})


def mesh_of_program(program: Program) -> Mesh:
    """Return the arrangement of the ranks of one replica."""
    return Mesh(1, program.widths, program.bidirectional)


def prove_local(program: Program) -> None:
    """Check each rank's list without looking at the others."""
    into: dict[int, list[Edge]] = defaultdict(list)
    out: dict[int, list[Edge]] = defaultdict(list)
    for edge in program.edges:
        into[edge.target].append(edge)
        out[edge.source].append(edge)
    mesh = mesh_of_program(program)
    proven: set[tuple[int, tuple[tuple[int, Direction], ...]]] = set()
    for rank, actions in enumerate(program.actions):
        plays = tuple((role.stage, role.direction) for role in mesh.roles(rank))
        # Ranks with the same stages usually share one list object, which is proven once.
        if (id(actions), plays) not in proven:
            proven.add((id(actions), plays))
            _List(rank, plays, program, into, out).run(actions)


class _List:
    """Walk one rank's list and keep what has been done."""

    def __init__(
        self,
        rank: int,
        plays: Sequence[tuple[int, Direction]],
        program: Program,
        into: Mapping[int, Sequence[Edge]],
        out: Mapping[int, Sequence[Edge]],
    ) -> None:
        self.rank, self.plays, self.program, self.into, self.out = rank, plays, program, into, out
        self.done: dict[Action, int] = {}

    def run(self, actions: Sequence[Action]) -> None:
        edges = set(self.program.edges)
        ends = [a for a in actions if a.act in (Act.BACKWARD, Act.BACKWARD_WEIGHT)]
        last = {a.stage: a for a in ends}
        for i, action in enumerate(actions):
            if action in self.done:
                self._fail(action, "a second time")
            if not self.program.training and action.act not in _INFERENCE:
                self._fail(action, "has no place in a program without training")
            if action.act is Act.STEP:
                if i + 1 < len(actions):
                    self._fail(actions[i + 1], "after the step")
            elif action.act is Act.REDUCE:
                if action.stage not in last:
                    self._fail(action, f"there is no backward of stage {action.stage} on this rank")
                self._after(action, last[action.stage])
            else:
                self._plays(action, edges)
                for needed in self._needs(action):
                    self._after(action, needed)
            self.done[action] = i
        self._complete()

    def _plays(self, action: Action, edges: set[Edge]) -> None:
        if (action.stage, action.direction) not in self.plays:
            self._fail(action, f"this rank does not play stage {action.stage} {action.direction}")
        if not 0 <= action.micro_batch < self.program.micro_batches:
            self._fail(action, f"there are only {self.program.micro_batches} micro-batches")
        if action.act in COMPUTE:
            return
        if action.edge is None or action.edge not in edges:
            self._fail(action, f"the program has no edge {action.edge}")
        elif action.stage != getattr(action.edge, _END[action.act]):
            self._fail(action, f"this is not stage {getattr(action.edge, _END[action.act])} of its edge")
        elif action.act in (Act.RECEIVE_GRAD, Act.SEND_GRAD) and not action.edge.differentiable:
            self._fail(action, "its edge is not differentiable")

    def _needs(self, action: Action) -> list[Action]:
        """Return what must come earlier in the list."""
        if action.act is Act.FORWARD:
            return [_with(action, Act.RECEIVE, e) for e in self.into.get(action.stage, ())]
        if action.act is Act.SEND:
            return [_with(action, Act.FORWARD)]
        if action.act is Act.BACKWARD:
            grads = [e for e in self.out.get(action.stage, ()) if e.differentiable]
            return [_with(action, Act.FORWARD), *(_with(action, Act.RECEIVE_GRAD, e) for e in grads)]
        if action.act in (Act.SEND_GRAD, Act.BACKWARD_WEIGHT):
            return [_with(action, Act.BACKWARD)]
        return []

    def _complete(self) -> None:
        """Check that every computation that was begun is finished, and every message of it sent."""
        for action in list(self.done):
            if action.act is Act.FORWARD:
                follow = [_with(action, Act.SEND, e) for e in self.out.get(action.stage, ())]
                if self.program.training:
                    follow.append(_with(action, Act.BACKWARD))
            elif action.act is Act.BACKWARD:
                grads = [e for e in self.into.get(action.stage, ()) if e.differentiable]
                follow = [_with(action, Act.SEND_GRAD, e) for e in grads]
                if self.program.splits_backward:
                    follow.append(_with(action, Act.BACKWARD_WEIGHT))
                follow.append(Action(Act.REDUCE, action.stage))
            else:
                continue
            for missing in follow:
                if missing not in self.done:
                    self._fail(missing, f"missing, although {action} is there")
        if self.program.training and Action(Act.STEP) not in self.done:
            self._fail(Action(Act.STEP), "missing")

    def _after(self, action: Action, needed: Action) -> None:
        if needed not in self.done:
            self._fail(action, f"needs {needed.act} {needed}, which does not come before it")

    def _fail(self, action: Action, reason: str) -> None:
        raise ProgramError(self.rank, action, reason)


def _with(action: Action, act: Act, edge: Edge | None = None) -> Action:
    return Action(act, action.stage, action.micro_batch, action.direction, edge)
