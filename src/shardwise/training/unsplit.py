"""The reference of every plan: one device that passes the same micro-batches through, one after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.graph.trace import leaves, transform
from shardwise.plan import Plan, micro_batches_of, samples_of
from shardwise.training.loss_graph import Loss


def unsplit_step(
    model: nn.Module, loss: Loss, x: Any, y: Any, plan: Plan, loss_mean: str = "exact"
) -> Tensor:
    """Compute loss and gradients (into `.grad`) of a mini-batch on one device; return the loss.

    A micro-batch is what all replicas have of it, so batch norm sees what it sees under the plan. With
    `loss_mean="micro-batch"` each has a loss of its own, which counts as much as its samples.
    """
    batch = next(int(t.shape[0]) for t in leaves(x) if isinstance(t, Tensor))
    outputs: list[Any] = []
    means: list[Tensor] = []
    order: list[int] = []
    for m in range(micro_batches_of(plan)):
        spans = [samples_of(plan, batch, replica, m) for replica in range(plan.data)]
        chosen = [sample for lo, hi in spans for sample in range(lo, hi)]
        if chosen:
            order += chosen
            outputs.append(call_model(model, _pick(x, chosen)))
            if loss_mean == "micro-batch":
                means.append(loss(outputs[-1], _pick(y, chosen)) * (len(chosen) / batch))
    back = [order.index(sample) for sample in range(batch)]
    value: Tensor = sum(means[1:], means[0]) if means else loss(_pick(_joined(outputs), back), y)
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def call_model(model: nn.Module, x: Any) -> Any:
    """Call a model with an input in any of the forms that an example may have."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def _pick(tree: Any, samples: list[int]) -> Any:
    return transform(tree, lambda leaf: leaf[samples] if isinstance(leaf, Tensor) and leaf.ndim else leaf)


def _joined(outputs: list[Any]) -> Any:
    """Join the outputs of all micro-batches, whatever their structure is."""
    if len(outputs) == 1:
        return outputs[0]
    columns = zip(*(leaves(output) for output in outputs), strict=True)
    whole = iter(
        [torch.cat(list(column)) if isinstance(column[0], Tensor) else column[0] for column in columns]
    )
    return transform(outputs[0], lambda _: next(whole))
