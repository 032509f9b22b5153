"""Normalisation whose statistics no other rank shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shardwise.program import Compute
from shardwise.runtime.rules.registry import Run, crop, generic, rule
from shardwise.runtime.rules.straight import straight


@rule("batch_norm")
def bind_batch_norm(op: Compute, rank: int) -> Run:
    """Bind a batch norm with this rank's own statistics, or with the running ones."""
    attributes = op.layer.attributes
    if not attributes.get("unbiased", True):
        return generic(op, rank)  # its own call keeps the averages of biased variances
    training, eps = bool(attributes["batch_statistics"]), attributes["eps"]
    momentum = attributes["momentum"]
    roles = {operand.role: i for i, operand in enumerate(op.layer.operands)}
    slices = crop(op, rank, 0)

    def run(tensors: Sequence[Any]) -> Tensor:
        def get(role: str) -> Any:
            return tensors[roles[role]] if role in roles else None

        x = tensors[0] if slices is None else tensors[0][slices]
        factor = momentum
        counter = get("num_batches_tracked")
        if training and counter is not None:
            counter.add_(1)
            if factor is None:
                factor = 1.0 / float(counter)
        mean, var = get("running_mean"), get("running_var")
        return F.batch_norm(x, mean, var, get("weight"), get("bias"), training, factor or 0.0, eps)

    return run


@rule("instance_norm")
def bind_instance_norm(op: Compute, rank: int) -> Run:
    """Bind a norm of single samples, which takes gradients in one order only."""
    normalise = generic(op, rank)

    def run(tensors: Sequence[Any]) -> Tensor:
        made: Tensor = straight(normalise(tensors))
        return made

    return run


@rule("local_response_norm")
def bind_local_response_norm(op: Compute, rank: int) -> Run:
    """Bind a norm over neighbouring channels: normalise all that are held, keep those that are wanted."""
    attributes, slices = op.layer.attributes, crop(op, rank, 0)
    settings = (attributes["size"], attributes["alpha"], attributes["beta"], attributes["k"])
    start = op.makes.layout.box(rank).lo[1] - op.wants[0].box(rank).lo[1]
    channels = op.makes.layout.box(rank).shape[1]

    def run(tensors: Sequence[Any]) -> Tensor:
        x = tensors[0] if slices is None else tensors[0][slices]
        return F.local_response_norm(x, *settings).narrow(1, start, channels)

    return run
