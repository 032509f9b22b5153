"""Stock DistributedDataParallel: a step whose buckets travel during the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def measure(ranks: Any, effort: float) -> list[dict[str, Any]]:
    """Return the seconds of a step: no messages, buckets waited for at once, and in the background."""
    torch.manual_seed(0)
    network = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())))
    batch = torch.rand(96, 1024)
    rows = []
    for transport, group in (("mpi4py", None), ("gloo", ranks.gloo)):
        plain, eager = (
            DistributedDataParallel(copy.deepcopy(network), process_group=group, bucket_cap_mb=8)
            for _ in range(2)
        )
        eager.register_comm_hook(group, _at_once)
        kinds = {
            "no messages": _step(network, batch),
            "at once": _step(eager, batch),
            "background": _step(plain, batch),
        }
        rows.append({"transport": transport} | ranks.median(kinds, max(5, int(effort * 30))))
    return rows


def _step(network: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        network(batch).square().mean().backward()

    return run


# Without annotations: torch refuses those that are strings.
def _at_once(group, bucket):  # type: ignore[no-untyped-def]
    """Wait for a bucket as soon as it is started."""
    buffer = bucket.buffer().div_(dist.get_world_size(group))
    dist.all_reduce(buffer, group=group)
    future: Any = torch.futures.Future()
    future.set_result(buffer)
    return future
