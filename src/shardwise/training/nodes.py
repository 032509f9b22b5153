"""Find out how the ranks of a job lie on its nodes, so that those that talk most can sit on one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.runtime.session import Session


def ranks_per_node(session: Session) -> int | None:
    """Return how many consecutive ranks each node has, the same answer on every rank; all of them ask.

    None where all are on one node, or where nodes differ: then ranks keep their natural order.
    """
    place = session.place
    if place.local_size == place.size:
        return None
    count = place.local_size
    regular = place.size % count == 0 and place.rank % count == place.local_rank
    told = torch.tensor([count, -count, int(regular)], device=session.device)
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    least, most, alike = told.tolist()
    return int(least) if alike and least == -most else None
