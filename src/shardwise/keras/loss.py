"""The compiled loss of a Keras model as the last layer of its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch
from keras.src.backend.common.stateless_scope import StatelessScope
from torch import Tensor

from shardwise.graph.trace import leaves, transform
from shardwise.training.loss_graph import WholeLoss

_MEANS = ("sum_over_batch_size", "mean")


def structure_of(tree: Any) -> Any:
    """Return what a tree of targets looks like: True where a tensor is, None where nothing is."""
    return transform(tree, lambda leaf: None if leaf is None else True)


def pack(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Put tensors into a structure, in its order."""
    given = iter(tensors)
    return transform(structure, lambda leaf: None if leaf is None else next(given))


class KerasLoss(WholeLoss):
    """Compute the compiled loss of a share of the mini-batch, and keep the predictions that it saw.

    The targets arrive flat, the numbers of the samples last; `structure` says how to pack the others.
    """

    def __init__(self, model: Any, structure: Any, *, keeps: bool) -> None:
        self.model, self.structure, self.keeps = model, structure, keeps
        self.batch = 0
        self.seen: list[tuple[Tensor, list[Tensor]]] = []

    def begin(self, batch: int) -> None:
        """Start a mini-batch of so many samples."""
        self.batch = batch
        self.seen.clear()

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss of a share, as a mean over its samples."""
        *flat, samples = targets
        predictions = leaves(outputs)
        if self.keeps:
            self.seen.append((samples, [p.detach() for p in predictions]))
        if not samples.numel():
            return torch.stack([p.sum() for p in predictions]).sum() * 0.0
        y, weight = pack(self.structure, flat)
        with StatelessScope():  # the trackers of single losses are fed once, with the whole mini-batch
            value = self.model._compile_loss(y, outputs, weight)
        if self.model._compile_loss.reduction == "sum" or is_sum(self.model):
            value = value * (self.batch / samples.numel())
        result: Tensor = value.to(predictions[0].dtype)
        return result


def compiled_losses(model: Any) -> list[Any]:
    """Return the loss functions that were given to `compile`, flat."""
    return [entry for entry in keras.tree.flatten(model._compile_loss._user_loss) if entry is not None]


def is_sum(model: Any) -> bool:
    """Tell whether the compiled losses are sums over the samples."""
    return all(getattr(loss, "reduction", None) == "sum" for loss in compiled_losses(model))


def check_losses(model: Any, shares: int, weighted: bool) -> None:
    """Refuse losses that sharing the mini-batch out would change."""
    if model._compile_loss is None:
        raise ValueError(f"Keras model {model.name!r} was compiled without a loss; give loss= to compile()")
    if shares == 1:
        return
    found = {getattr(loss, "reduction", "sum_over_batch_size") for loss in compiled_losses(model)}
    if found == {"sum"} or found <= set(_MEANS):
        return
    if found <= {*_MEANS, "mean_with_sample_weight"} and not weighted:
        return
    raise ValueError(
        f"the losses of {model.name!r} reduce by {sorted(map(str, found))}, which {shares} shares of the "
        "mini-batch (replicas x micro-batches) would change; use sum_over_batch_size, or one share"
    )
