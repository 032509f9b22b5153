"""Clip gradients by their global norm, every slice of every parameter counted exactly once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.runtime.fabric import Fabric
from shardwise.runtime.placement import Placement

_EPSILON = 1e-6


def clip_gradients(
    parameters: Mapping[str, nn.Parameter], fabric: Fabric, placement: Placement, limit: float
) -> float:
    """Scale all gradients down so that their norm over all ranks is at most `limit`; return the norm before.

    The formula is that of `torch.nn.utils.clip_grad_norm_`. Collective over the world.
    """
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, parameter in parameters.items():
        box = placement.parameters[name][fabric.rank]
        if parameter.grad is not None and not box.empty and placement.owner(name, box) == fabric.rank:
            total += parameter.grad.double().square().sum()
    fabric.world.all_reduce(total)
    norm = float(total.sqrt())
    factor = limit / (norm + _EPSILON)
    if factor < 1.0:
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    return norm
