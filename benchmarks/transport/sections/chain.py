"""A token that goes round all ranks: seconds per hop with our waits and with MPI's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def measure(ranks: Any, effort: float) -> list[dict[str, Any]]:
    """Return one row with the seconds per hop of each kind of wait."""
    token = torch.zeros(2)
    array = token.numpy()
    right, left = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
    laps = 100

    def lap(send: Callable[[], Any], receive: Callable[[], Any]) -> Callable[[], None]:
        first, second = (send, receive) if ranks.rank == 0 else (receive, send)

        def run() -> None:
            for _ in range(laps):
                first()
                second()

        return run

    kinds = {
        "raw": lap(lambda: ranks.comm.Send(array, right), lambda: ranks.comm.Recv(array, left)),
        "ours": lap(lambda: dist.send(token, right), lambda: dist.recv(token, left)),
    }
    times = ranks.median(kinds, max(3, int(10 * effort)))
    return [{"ranks": ranks.size} | {name: spent / (laps * ranks.size) for name, spent in times.items()}]
