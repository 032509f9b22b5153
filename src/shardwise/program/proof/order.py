"""Part four: no message overtakes another of its channel, so transports without tags can carry them.

A channel leads from one stage to another in one direction of the pipeline, for values or for gradients.
Where both directions of a pipeline meet, a value of one may overtake a gradient of the other.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from shardwise.plan import Direction
from shardwise.program.actions import Act, Action, Program
from shardwise.program.errors import ProgramError

_Channel = tuple[int, int, Direction, bool]
_SENDS = frozenset({Act.SEND, Act.SEND_GRAD})
_GRADIENTS = frozenset({Act.SEND_GRAD, Act.RECEIVE_GRAD})


def prove_order(program: Program) -> None:
    """Check that on every channel messages are received in the order in which they are sent."""
    sent, received = _by_channel(program)
    for channel, senders in sent.items():
        ends = itertools.product(senders.items(), received[channel].items())
        for (rank, here), (peer, there) in ends:
            for mine, theirs in zip(here, there, strict=True):
                if (mine.edge, mine.micro_batch) != (theirs.edge, theirs.micro_batch):
                    raise ProgramError(rank, mine, f"rank {peer} expects {theirs} at this place", peer)


_Ends = dict[_Channel, dict[int, list[Action]]]


def _by_channel(program: Program) -> tuple[_Ends, _Ends]:
    """Return what every rank sends and receives on each channel; ranks that share a list appear once."""
    sent: _Ends = defaultdict(lambda: defaultdict(list))
    received: _Ends = defaultdict(lambda: defaultdict(list))
    firsts = {id(program.actions[rank]): rank for rank in reversed(range(program.ranks))}
    for rank in sorted(firsts.values()):
        for action in program.actions[rank]:
            if action.edge is not None:
                channel = (
                    action.edge.source,
                    action.edge.target,
                    action.direction,
                    action.act in _GRADIENTS,
                )
                (sent if action.act in _SENDS else received)[channel][rank].append(action)
    return sent, received
