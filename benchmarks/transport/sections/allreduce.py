"""All-reduce of 8 B and of 1, 25 and 100 MB: raw mpi4py, our backend, Gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

SIZES = [8, 1_000_000, 25_000_000, 100_000_000]


def measure(ranks: Any, effort: float) -> list[dict[str, Any]]:
    """Return one row per size with the seconds of each transport."""
    rows = []
    in_place = ranks.mpi.IN_PLACE
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        array = tensor.numpy()
        rounds = max(3, int(effort * (200 if size < 1_000_000 else 8)))
        kinds = {
            "raw": lambda a=array: ranks.comm.Allreduce(in_place, a),
            "ours": lambda t=tensor: dist.all_reduce(t),
            "gloo": lambda t=tensor: dist.all_reduce(t, group=ranks.gloo),
        }
        rows.append({"bytes": size} | ranks.median(kinds, rounds))
    return rows
