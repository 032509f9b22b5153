"""Latency and bandwidth between two ranks: raw mpi4py, our backend, Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

SIZES = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def measure(ranks: Any, effort: float) -> list[dict[str, Any]]:
    """Return one row per message size with the one-way seconds of each transport."""
    rows = []
    for size in SIZES:
        rounds = max(3, int(effort * (60 if size <= 32 << 10 else 6)))
        repeats = 20 if size <= 32 << 10 else 2
        times = ranks.median(_kinds(ranks, size, repeats), rounds)
        rows.append({"bytes": size} | {name: spent / (2 * repeats) for name, spent in times.items()})
    return rows


def _kinds(ranks: Any, size: int, repeats: int) -> dict[str, Callable[[], None]]:
    tensor = torch.zeros(size // 4)
    array, peer, comm = tensor.numpy(), 1 - ranks.rank, ranks.comm
    gloo = ranks.gloo

    def ping_pong(send: Callable[[], Any], receive: Callable[[], Any]) -> Callable[[], None]:
        first, second = (send, receive) if ranks.rank == 0 else (receive, send)

        def run() -> None:
            for _ in range(repeats):
                first()
                second()

        return run

    return {
        "raw": ping_pong(lambda: comm.Send(array, peer), lambda: comm.Recv(array, peer)),
        "ours": ping_pong(lambda: dist.send(tensor, peer), lambda: dist.recv(tensor, peer)),
        "gloo": ping_pong(
            lambda: dist.send(tensor, peer, group=gloo), lambda: dist.recv(tensor, peer, group=gloo)
        ),
    }
