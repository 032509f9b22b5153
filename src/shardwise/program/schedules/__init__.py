"""The schedules: in which order every rank of a replica computes, one short generator each.

Letters:  S stages, s a stage,  M micro-batches, m a micro-batch,  F forward, B backward, W weights' part.
A generator knows nothing of messages; those follow from the edges when the program is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardwise.plan import Mesh, Plan
from shardwise.program.actions import Action
from shardwise.program.schedules.bidirectional import bidirectional
from shardwise.program.schedules.gems import gems
from shardwise.program.schedules.straight import gpipe, one_forward_one_backward
from shardwise.program.schedules.zero_bubble import zero_bubble

Orders = Sequence[Sequence[Action]]

_GENERATORS: Mapping[str, Callable[[Plan, Mesh], Orders]] = {
    "layer": gpipe,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "gems-mast": gems,
    "gems-master": gems,
    "bidirectional": bidirectional,
    "zero-bubble": zero_bubble,
}


def orders(plan: Plan, mesh: Mesh) -> Orders:
    """Return what every position of a replica computes, in order."""
    return _GENERATORS[plan.schedule](plan, mesh)


__all__ = ["Orders", "orders"]
