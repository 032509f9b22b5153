"""Learn which ranks share this node, and which cores they may use together.

A launcher may let all ranks of a node use all of its cores, or bind each to cores of its own: neither the
number of cores that one rank may use, nor that of the node, tells alone whether the ranks crowd it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from torch.distributed import Store  # type: ignore[attr-defined]

from shardwise.runtime.environment import Place


def meet(store: Store, place: Place) -> tuple[Place, int]:
    """Tell the others where this rank is; return its place, and how many cores its node's ranks share."""
    host, mask = socket.gethostname(), _mask(os.sched_getaffinity(0))
    store.set(f"place/{place.rank}", f"{mask:x} {host}")
    told = store.multi_get([f"place/{rank}" for rank in range(place.size)])
    return neighbours(place, [text.decode() for text in told])


def neighbours(place: Place, told: list[str]) -> tuple[Place, int]:
    """Read what every rank told: the mask of its cores and its host."""
    entries = [text.split(maxsplit=1) for text in told]
    host = entries[place.rank][1]
    here = [rank for rank, entry in enumerate(entries) if entry[1] == host]
    together = 0
    for rank in here:
        together |= int(entries[rank][0], 16)
    if place.guessed:
        place = replace(place, local_rank=here.index(place.rank), local_size=len(here), guessed=False)
    return place, together.bit_count()


def threads_of(own_cores: int, node_cores: int, local_ranks: int) -> int:
    """Return how many threads a rank may compute with: its share of the node, but no more than its own."""
    return max(1, min(own_cores, node_cores // local_ranks))


def _mask(cores: set[int]) -> int:
    return sum(1 << core for core in cores)
