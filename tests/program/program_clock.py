"""A tiny clock for programs: run all lists with given seconds per computation and free messages."""

from __future__ import annotations

from collections import Counter

from shardwise.plan import Mesh
from shardwise.program.actions import COMPUTE, Act, Action, Program

_SENDER = {Act.RECEIVE: (Act.SEND, "source"), Act.RECEIVE_GRAD: (Act.SEND_GRAD, "target")}


def makespan(program: Program, forward: float = 1.0, backward: float = 2.0, weight: float = 0.0) -> float:
    """Return when the last rank ends its last computation."""
    seconds = {Act.FORWARD: forward, Act.BACKWARD: backward, Act.BACKWARD_WEIGHT: weight}
    mesh = Mesh(1, program.widths, program.bidirectional)
    now = [0.0] * program.ranks
    at = [0] * program.ranks
    ended: dict[Action, float] = {}

    def ready(rank: int, action: Action) -> bool:
        if action.act in COMPUTE:
            members = mesh.member_positions(action.stage, action.direction)
            return all(_current(program, at, r) == action for r in members)
        return action.act not in _SENDER or _sent(action) in ended

    moved = True
    while moved:
        moved = False
        for rank in range(program.ranks):
            while (action := _current(program, at, rank)) is not None and ready(rank, action):
                moved = True
                if action.act in COMPUTE:
                    members = mesh.member_positions(action.stage, action.direction)
                    end = max(now[r] for r in members) + seconds[action.act]
                    for r in members:
                        now[r], at[r] = end, at[r] + 1
                    continue
                if action.act in _SENDER:
                    now[rank] = max(now[rank], ended[_sent(action)])
                ended[action] = max(now[rank], ended.get(action, 0.0))
                at[rank] += 1
    assert at == [len(actions) for actions in program.actions]
    return max(now)


def peaks(program: Program, until: Act = Act.BACKWARD) -> list[Counter[int]]:
    """Return for each rank and stage how many micro-batches are alive at most, from forward to `until`."""
    result = []
    for actions in program.actions:
        alive: Counter[int] = Counter()
        peak: Counter[int] = Counter()
        for action in actions:
            if action.act is Act.FORWARD:
                alive[action.stage] += 1
            elif action.act is until:
                alive[action.stage] -= 1
            peak[action.stage] = max(peak[action.stage], alive[action.stage])
        result.append(peak)
    return result


def _current(program: Program, at: list[int], rank: int) -> Action | None:
    actions = program.actions[rank]
    return actions[at[rank]] if at[rank] < len(actions) else None


def _sent(action: Action) -> Action:
    act, end = _SENDER[action.act]
    return Action(act, getattr(action.edge, end), action.micro_batch, action.direction, action.edge)
