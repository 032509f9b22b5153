"""What a choice of exchanges costs: work that is done twice, bytes that travel."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardwise.geometry.chain import Held
from shardwise.geometry.layout import Layout


def work(layouts: Mapping[str, Layout], flops: Mapping[str, float]) -> dict[int, float]:
    """Return the flops of each rank when every layer costs in proportion to the box that is made of it.

    Args:
        layouts: what each rank makes of every value.
        flops: the cost of every layer when it is not split; layers without an entry cost nothing.
    """
    result: dict[int, float] = {}
    for name, layout in layouts.items():
        each = flops.get(name, 0.0) / max(1, math.prod(layout.shape))
        for rank, box in zip(layout.ranks, layout.boxes, strict=True):
            result[rank] = result.get(rank, 0.0) + each * box.size
    return result


def redundant_fraction(owned: Mapping[str, Layout], held: Held, flops: Mapping[str, float]) -> float:
    """Return how much more is computed than what is owned, over all ranks: 0.05 is five percent more."""
    useful = sum(work({name: owned[name] for name in held.made}, flops).values())
    return sum(work(held.made, flops).values()) / useful - 1.0 if useful else 0.0


def halo_bytes(made: Layout, wanted: Layout, itemsize: int) -> dict[int, int]:
    """Return how many bytes of a value each rank receives in an exchange."""
    mine = dict(zip(made.ranks, made.boxes, strict=True))
    return {
        rank: (want.size - (want.intersect(mine[rank]).size if rank in mine else 0)) * itemsize
        for rank, want in zip(wanted.ranks, wanted.boxes, strict=True)
    }
