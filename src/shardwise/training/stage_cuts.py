"""Cut the network of a trainer into stages, the same on every rank, within the memory that ranks have."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.graph import Graph
from shardwise.plan import Plan, PlanError, choose_cuts
from shardwise.runtime.doctor import memory_bytes
from shardwise.runtime.session import Session


def stage_cuts(
    graph: Graph, plan: Plan, session: Session, memory_limit: float | None
) -> tuple[tuple[int, ...], list[str]]:
    """Return the cuts, and notes on them; collective where ranks have to agree on their memory.

    Args:
        graph: the network with its loss, of one mini-batch.
        plan: how it is split.
        session: the job.
        memory_limit: bytes that a rank may hold; by default its share of the node, of which estimates are
            not sure enough to refuse a plan.
    """
    if plan.cuts or len(plan.stages) == 1:
        return choose_cuts(graph, plan), []
    if memory_limit is not None:
        return choose_cuts(graph, plan, memory_limit=memory_limit), []
    limit = _smallest_share(session)
    try:
        return choose_cuts(graph, plan, memory_limit=limit), []
    except PlanError as error:
        return choose_cuts(graph, plan), [f"memory: {error}; the stages are balanced by time alone"]


def _smallest_share(session: Session) -> float:
    """Return the least memory that any rank of the job has."""
    if session.device.type == "cuda":
        mine = float(torch.cuda.get_device_properties(session.device).total_memory)
    else:
        mine = memory_bytes() / session.place.local_size
    if session.size == 1:
        return mine
    share = torch.tensor(mine, dtype=torch.float64, device=session.device)
    dist.all_reduce(share, op=dist.ReduceOp.MIN)
    return float(share)
