"""The rank side: run one family of measurements and let rank 0 write its rows as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sections import allreduce, buckets, chain, halo, overlap, pairs, patterns

import shardwise.runtime as runtime
from shardwise.runtime.mpi import library

SECTIONS: dict[str, Callable[[Any, float], list[dict[str, Any]]]] = {
    "pairs": pairs.measure,
    "allreduce": allreduce.measure,
    "overlap": overlap.measure,
    "chain": chain.measure,
    "halo": halo.measure,
    "patterns": patterns.measure,
    "buckets": buckets.measure,
}


class Ranks:
    """What every section needs: the place, raw MPI beside the backend, and a Gloo group."""

    def __init__(self) -> None:
        session = runtime.init(backend="mpi4py")
        torch.set_num_threads(1)
        self.rank, self.size = session.rank, session.size
        self.mpi = library.load()
        self.comm = self.mpi.COMM_WORLD.Dup()
        self.gloo = dist.new_group(backend="gloo")

    def median(self, kinds: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
        """Return each kind's median seconds, taken in turns so that noise hits all alike."""
        times: dict[str, list[float]] = {name: [] for name in kinds}
        # Connections, caches and page tables are made in the first calls; none of that is measured.
        for _ in range(max(3, rounds // 4)):
            for call in kinds.values():
                dist.barrier()
                call()
        for _ in range(rounds):
            for name, call in kinds.items():
                dist.barrier()
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        return {name: sorted(found)[len(found) // 2] for name, found in times.items()}


def main() -> None:
    name, effort, target = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    ranks = Ranks()
    rows = SECTIONS[name](ranks, effort)
    if ranks.rank == 0:
        target.write_text(json.dumps(rows))
    runtime.finalize()


if __name__ == "__main__":
    main()
