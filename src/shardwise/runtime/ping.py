"""Measure a small round trip between ranks 0 and 1."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from shardwise.runtime.session import finalize, init

_ROUNDS = 200


def main() -> None:
    """Join, play ping-pong, print the median round trip on rank 0, leave."""
    session = init()
    tensor = torch.zeros(1, device=session.device)
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for sender in (0, 1):
            if session.rank == sender:
                dist.send(tensor, 1 - sender)
            else:
                dist.recv(tensor, sender)
        # A device may still be at it.
        tensor.item()
        times.append(time.perf_counter() - start)
    if session.rank == 0:
        print(f"round trip {sorted(times)[_ROUNDS // 2] * 1e6:.0f} us between 2 ranks")
    finalize()


if __name__ == "__main__":
    main()
