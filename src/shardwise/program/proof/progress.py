"""Part three: run all lists together and see that they end.

Every list is first reduced to its steps that matter between ranks: announcing something (a send, a sum, the
arrival at a computation of a group) and waiting until all ranks concerned have announced it. The lists of
many ranks are one object, so most of the work is done once for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from shardwise.program.actions import COMPUTE, Act, Action, Program
from shardwise.program.errors import ProgramError
from shardwise.program.proof.local import mesh_of_program

_SENDER = {Act.RECEIVE: Act.SEND, Act.RECEIVE_GRAD: Act.SEND_GRAD}
# A step: whether it waits (or else announces), the number of the thing, the index of its action.
_Step = tuple[bool, int, int]


def prove_progress(program: Program) -> None:
    """Run the lists with sends that never wait, receives and groups that do."""
    _Run(program).run()


class _Run:
    """The state of all ranks: how far each is, what has been announced how often, and who waits for it."""

    def __init__(self, program: Program) -> None:
        self.lists = program.actions
        mesh = mesh_of_program(program)
        self.members = {
            (s, d): mesh.member_positions(s, d) for s in range(mesh.stages) for d in mesh.directions
        }
        self.holders = {s: mesh.holders(s) for s in range(mesh.stages)}
        self.numbers: dict[Action, int] = {}
        compiled = {id(actions): list(self._steps(actions)) for actions in program.actions}
        self.steps = [compiled[id(actions)] for actions in program.actions]
        self.concerned = [self._concerned(thing) for thing in self.numbers]
        self.missing = [len(ranks) for ranks in self.concerned]
        self.waiting: list[list[int]] = [[] for _ in self.numbers]
        self.at = [0] * program.ranks

    def _steps(self, actions: tuple[Action, ...]) -> Iterator[_Step]:
        for i, action in enumerate(actions):
            if action.act in _SENDER:
                yield True, self._number(_sent(action)), i
            elif action.act is Act.STEP:
                for reduced in (a for a in actions if a.act is Act.REDUCE):
                    yield True, self._number(reduced), i
            elif action.act not in COMPUTE:
                yield False, self._number(action), i
            elif len(self.members[action.stage, action.direction]) > 1:
                yield False, self._number(action), i
                yield True, self._number(action), i

    def _number(self, action: Action) -> int:
        return self.numbers.setdefault(action, len(self.numbers))

    def _concerned(self, thing: Action) -> tuple[int, ...]:
        """Return the ranks that all have to announce a thing."""
        if thing.act is Act.REDUCE:
            return self.holders[thing.stage]
        return self.members[thing.stage, thing.direction]

    def run(self) -> None:
        runnable = deque(range(len(self.lists)))
        at, missing, waiting = self.at, self.missing, self.waiting
        while runnable:
            rank = runnable.popleft()
            steps = self.steps[rank]
            while at[rank] < len(steps):
                waits, thing, _ = steps[at[rank]]
                if not waits:
                    missing[thing] -= 1
                    if not missing[thing]:
                        runnable.extend(waiting[thing])
                elif missing[thing]:
                    waiting[thing].append(rank)
                    break
                at[rank] += 1
        stuck = [rank for rank, steps in enumerate(self.steps) if at[rank] < len(steps)]
        if stuck:
            raise self._explain(stuck[0])

    def _explain(self, stuck: int) -> ProgramError:
        """Follow who waits for whom until a rank comes up twice, and name that circle."""
        chain = [stuck]
        while (peer := self._waits_for(chain[-1])) not in chain:
            chain.append(peer)
        circle = chain[chain.index(peer) :]
        words = ", ".join(f"rank {rank} at {self._action(rank)}" for rank in circle)
        rank, peer = circle[0], self._waits_for(circle[0])
        reason = f"waits for ever for rank {peer}; a circle of waiting: {words}"
        return ProgramError(rank, self._action(rank), reason, peer)

    def _action(self, rank: int) -> Action:
        return self.lists[rank][self.steps[rank][self.at[rank]][2]]

    def _waits_for(self, rank: int) -> int:
        """Return a rank that has not announced what this one waits for."""
        thing = self.steps[rank][self.at[rank]][1]
        for peer in self.concerned[thing]:
            done = self.steps[peer][: self.at[peer]]
            if not any(not waits and number == thing for waits, number, _ in done):
                return peer
        raise AssertionError("a rank waits only for what somebody has not announced")


def _sent(action: Action) -> Action:
    """Return the send that a receive waits for."""
    assert action.edge is not None  # the local proof has seen to it
    stage = action.edge.source if action.act is Act.RECEIVE else action.edge.target
    return Action(_SENDER[action.act], stage, action.micro_batch, action.direction, action.edge)
