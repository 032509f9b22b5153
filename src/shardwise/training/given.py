"""What the user gives: a model or a recipe for one, and a loss that must survive being shared out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardwise.graph import Graph
from shardwise.graph.foreign import adapt
from shardwise.plan import Plan, PlanError, micro_batches_of
from shardwise.training.loss_kind import OTHER, SUM, loss_kind

Model = nn.Module | Callable[[], nn.Module]
LOSS_MEANS = ("exact", "micro-batch")


def made(model: Model) -> nn.Module:
    """Return the model, or make it on meta, where it costs nothing."""
    if isinstance(model, nn.Module):
        return adapt(model)
    with torch.device("meta"):
        result = model()
    if not isinstance(result, nn.Module):
        raise ValueError(f"model: the callable returned {type(result).__name__}; expected an nn.Module")
    return result


def check_loss(ending: Graph, plan: Plan, loss_mean: str) -> bool:
    """Refuse a loss that sharing out the mini-batch would change; tell whether it is a sum.

    Args:
        ending: the captured loss.
        plan: how the mini-batch is shared out.
        loss_mean: `exact`, or `micro-batch` to accept the mean of the means of the shares.
    """
    if loss_mean not in LOSS_MEANS:
        raise ValueError(f"loss_mean: found {loss_mean!r}; expected one of {', '.join(LOSS_MEANS)}")
    shares = plan.data * micro_batches_of(plan)
    if shares == 1:
        return False
    found = loss_kind(ending)
    if found.kind == OTHER and loss_mean == "exact":
        raise PlanError(
            "loss",
            f"what its layer {found.layer!r} computes is no mean over samples, so {shares} shares of the "
            "mini-batch (replicas x micro-batches) would change it",
            'use one replica and one micro-batch, or accept the mean over shares: loss_mean="micro-batch"',
        )
    return found.kind == SUM
