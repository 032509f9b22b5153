"""Time the optimizer: small parameters cost software, large ones are read again for every term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import nn

from shardwise.machine import Link
from shardwise.runtime.calibrate.clock import repeat

SIZES = (256, 16 << 10, 256 << 10, 2 << 20, 8 << 20, 32 << 20)
# Parameters of a network are in no cache when their turn comes again.
_BEYOND_CACHE, _MOST = 64 << 20, 512


def update_times(seconds: float) -> dict[int, float]:
    """Return the seconds of updating one parameter of every size under SGD with momentum."""
    # Half of the time for the largest: they are most of what is updated, and each takes long.
    shares = [0.5 / (len(SIZES) - 1)] * (len(SIZES) - 1) + [0.5]
    return {n: update_seconds(n, seconds * share) for n, share in zip(SIZES, shares, strict=True)}


def update_seconds(nbytes: int, seconds: float) -> float:
    """Return the seconds of updating one parameter of a size, repeated for some time."""
    count = max(1, min(_MOST, _BEYOND_CACHE // nbytes))
    parameters = [nn.Parameter(torch.ones(nbytes // 4)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    return repeat(optimizer.step, seconds) / count


def update_link(ranks: Sequence[Mapping[int, float]]) -> Link:
    """Put what all ranks measured together."""
    table = tuple((float(n), fmean(times[n] for times in ranks)) for n in sorted(ranks[0]))
    return Link(table[0][1], max(n / t for n, t in table), table)
