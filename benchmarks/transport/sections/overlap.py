"""How much of a message disappears behind a computation that calls `progress()` now and then.

Within a node a large message is one copy, made by the receiver inside an MPI call. So a sender can hide all
of it, while a receiver without a spare core pays for the copy whenever it is made:

    one way      rank 0 sends and computes, rank 1 receives at once; seconds of rank 0
    both ways    both send, receive and compute
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.runtime import progress

SIZES = [1 << 20, 16 << 20, 64 << 20]


def measure(ranks: Any, effort: float) -> list[dict[str, Any]]:
    """Return one row per direction and size: seconds alone and exposed seconds."""
    rows = []
    for direction in ("one way", "both ways"):
        for size in SIZES:
            rounds = max(5, int(effort * (60 if size == SIZES[0] else 12)))
            rows.append({"direction": direction, "bytes": size} | _row(ranks, direction, size, rounds))
    return rows


def _row(ranks: Any, direction: str, size: int, rounds: int) -> dict[str, float]:
    sent, received = torch.zeros(size // 4), torch.zeros(size // 4)
    sends = direction == "both ways" or ranks.rank == 0
    receives = direction == "both ways" or ranks.rank == 1
    computes = direction == "both ways" or ranks.rank == 0
    peer, matrix = 1 - ranks.rank, torch.ones(192, 192)

    def start() -> list[Any]:
        works = [dist.irecv(received, peer)] if receives else []
        return works + ([dist.isend(sent, peer)] if sends else [])

    def exchange() -> None:
        for work in start():
            work.wait()

    alone = ranks.median({"alone": exchange}, 5)["alone"]
    # The same number on both ranks, or one would wait for the other's computation.
    steps = torch.tensor([max(4.0, 1.5 * alone / _step_seconds(matrix))])
    dist.broadcast(steps, 0)
    compute = _computation(matrix, int(steps)) if computes else lambda: None

    def both() -> None:
        works = start()
        compute()
        for work in works:
            work.wait()

    times = ranks.median({"compute": compute, "both": both, "exchange": exchange}, rounds)
    return {"alone": times["exchange"], "exposed": max(0.0, times["both"] - times["compute"])}


def _computation(matrix: torch.Tensor, steps: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(steps):
            torch.mm(matrix, matrix)
            progress()

    return run


def _step_seconds(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(50):
        torch.mm(matrix, matrix)
        progress()
    return (time.perf_counter() - start) / 50
