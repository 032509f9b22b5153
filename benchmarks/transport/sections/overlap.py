"""How much of an exchange disappears behind a computation that calls `progress()` now and then."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from shardwise.runtime import progress

SIZES = [1 << 20, 16 << 20, 64 << 20]


def measure(ranks: Any, effort: float) -> list[dict[str, Any]]:
    """Return one row per size: seconds alone, exposed seconds and the share hidden."""
    rows = []
    for size in SIZES:
        sent, received = torch.zeros(size // 4), torch.zeros(size // 4)
        peer = 1 - ranks.rank
        matrix = torch.ones(192, 192)

        def start(sent: Any = sent, received: Any = received, peer: int = peer) -> list[Any]:
            return [dist.irecv(received, peer), dist.isend(sent, peer)]

        def exchange(start: Any = start) -> None:
            for work in start():
                work.wait()

        alone = ranks.median({"alone": exchange}, max(3, int(4 * effort)))["alone"]
        steps = max(4, int(1.5 * alone / _step_seconds(matrix)))

        def compute(matrix: torch.Tensor = matrix, steps: int = steps) -> None:
            for _ in range(steps):
                torch.mm(matrix, matrix)
                progress()

        def both(start: Any = start, compute: Any = compute) -> None:
            works = start()
            compute()
            for work in works:
                work.wait()

        kinds = {"compute": compute, "both": both, "exchange": exchange}
        times = ranks.median(kinds, max(3, int(4 * effort)))
        exposed = max(0.0, times["both"] - times["compute"])
        rows.append({"bytes": size, "alone": times["exchange"], "exposed": exposed})
    return rows


def _step_seconds(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    for _ in range(50):
        torch.mm(matrix, matrix)
        progress()
    return (time.perf_counter() - start) / 50
