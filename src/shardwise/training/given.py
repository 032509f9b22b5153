"""What the user gives: a model or a recipe for one, and a loss that must survive being shared out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardwise.graph import Graph
from shardwise.graph.foreign import adapt
from shardwise.plan import Plan, PlanError, Split, Way, micro_batches_of
from shardwise.training.loss_kind import OTHER, SUM, loss_kind
from shardwise.training.mixing import mixing_layer
from shardwise.training.replica_sums import with_replica_sums

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


def shared_out(ending: Graph, plan: Plan, loss_mean: str) -> tuple[Graph, bool]:
    """Return the loss of one share of the mini-batch, and whether those of all shares are summed.

    Args:
        ending: the captured loss.
        plan: how the mini-batch is shared out.
        loss_mean: `exact`, or `micro-batch` to accept the mean of the losses of the shares.

    Raises:
        PlanError: if sharing out the mini-batch would change the loss and nobody accepted that.
    """
    if loss_mean not in LOSS_MEANS:
        raise ValueError(f"loss_mean: found {loss_mean!r}; expected one of {', '.join(LOSS_MEANS)}")
    parts = micro_batches_of(plan)
    if plan.data * parts == 1:
        return ending, False
    found = loss_kind(ending)
    if found.kind != OTHER:
        return ending, found.kind == SUM
    summed = with_replica_sums(ending) if plan.data > 1 else ending
    if loss_mean == "exact" and (parts > 1 or summed is None):
        raise PlanError(
            "loss",
            f"what its layer {found.layer!r} computes is no mean over samples, so {plan.data * parts} shares "
            "of the mini-batch (replicas x micro-batches) would change it",
            _way_out(plan, parts, summed is not None),
        )
    return ending if summed is None else summed, False


def check_samples(graph: Graph, plan: Plan) -> None:
    """Refuse to share out the mini-batch of a network that mixes samples.

    Args:
        graph: the network, without or with its loss.
        plan: how the mini-batch is shared out.

    Raises:
        PlanError: if a layer other than batch norm needs all samples together.
    """
    shares = plan.data * micro_batches_of(plan)
    layer = mixing_layer(graph) if shares > 1 else None
    if layer is None:
        return
    place = f", {layer.where}" if layer.where else ""
    raise PlanError(
        "data" if plan.data > 1 else "micro_batches",
        f"the layer {layer.name!r} ({layer.op}{place}) mixes the samples of the mini-batch, so {shares} "
        "shares of it (replicas x micro-batches) would change its values",
        f"nearest plan that works: {_in_one_piece(plan)}",
    )


def _in_one_piece(plan: Plan) -> Plan:
    """Return a plan that keeps the mini-batch together; replicas of one stage share its samples."""
    whole = plan.replace(data=1, micro_batches=1, schedule="1f1b", replication=1)
    if len(plan.stages) == 1 and plan.stages[0].width == 1:
        return whole.replace(stages=(Split(Way.BATCH, (plan.data,)),))
    return whole


def _way_out(plan: Plan, parts: int, over_replicas: bool) -> str:
    fewer = "one micro-batch" if plan.data == 1 or over_replicas else "one replica and one micro-batch"
    shares = "micro-batches" if parts > 1 and (plan.data == 1 or over_replicas) else "shares"
    return f'use {fewer}, or accept the mean over {shares}: loss_mean="micro-batch"'
