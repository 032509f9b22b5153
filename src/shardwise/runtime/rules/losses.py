"""The terms of a loss: this rank's numerator and denominator, and their ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.program import Compute
from shardwise.program.losses import CLASSES, WEIGHED
from shardwise.runtime.rules.registry import Run, cropped, rule

_SETTINGS = ("beta", "delta", "log_target")


@rule("loss_terms")
def bind_terms(op: Compute, rank: int) -> Run:
    """Bind the sums of a loss over this rank's samples and pixels.

    A loss that every rank sees whole is not partial: all of them make the same two numbers.
    """
    attributes = op.layer.attributes
    if attributes["loss"] in CLASSES:
        return _class_terms(op, rank)
    function: Callable[..., Tensor] = getattr(F, attributes["loss"])
    pick = cropped(op, rank)
    options = {name: attributes[name] for name in _SETTINGS if name in attributes}
    weights = [operand.role for operand in op.layer.operands[2:]]
    by_batch = attributes["reduction"] == "batchmean"
    by_weight = attributes["loss"] in WEIGHED and "weight" in weights

    def run(tensors: Sequence[Any]) -> Tensor:
        value, target, *rest = map(_wide, pick(tensors))
        given = dict(zip(weights, rest, strict=True))
        total = function(value, target, reduction="sum", **given, **options)
        if by_weight:
            return torch.stack((total, given["weight"].sum().to(total.dtype)))
        return torch.stack((total, total.new_full((), 0 if by_batch else value.numel())))

    return run


def _class_terms(op: Compute, rank: int) -> Run:
    """Sum a cross-entropy; the denominator is the weight of the targets that count."""
    attributes, pick = op.layer.attributes, cropped(op, rank)
    ignore = attributes.get("ignore_index", -100)
    smoothing = attributes.get("label_smoothing", 0.0)
    is_cross_entropy = attributes["loss"] == "cross_entropy"

    def run(tensors: Sequence[Any]) -> Tensor:
        value, target, *rest = map(_wide, pick(tensors))
        weight = rest[0] if rest else None
        if is_cross_entropy:
            total = F.cross_entropy(value, target, weight, None, ignore, None, "sum", smoothing)
        else:
            total = F.nll_loss(value, target, weight, None, ignore, None, "sum")
        if target.is_floating_point():
            count = total.new_full((), target.numel() // target.shape[1])
        else:
            counts = target != ignore
            if weight is None:
                count = counts.sum().to(total.dtype)
            else:
                count = weight[target[counts]].sum()
        return torch.stack((total, count.detach()))

    return run


def _wide(tensor: Any) -> Any:
    """Return what sums over many pixels are taken of: 16 bits are too few for them."""
    narrow = isinstance(tensor, Tensor) and tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if narrow else tensor


@rule("loss_ratio")
def bind_ratio(op: Compute, rank: int) -> Run:
    """Bind the division of the two sums, or the sum alone; a share without samples has no mean.

    A share of a mini-batch gets its scale from outside, because its own count would not do; a copy of it,
    since the next micro-batch overwrites it before the backward pass of this one.
    """
    attributes = op.layer.attributes
    dtype = getattr(torch, op.layer.spec.dtype)
    if len(op.reads) > 1:
        return lambda tensors: (tensors[0][0] * tensors[1].clone()).to(dtype)
    if attributes["reduction"] == "sum" or attributes["empty"]:
        return lambda tensors: tensors[0][0].to(dtype)
    if attributes["reduction"] == "batchmean":
        return lambda tensors: (tensors[0][0] / attributes["samples"]).to(dtype)
    return lambda tensors: (tensors[0][0] / tensors[0][1]).to(dtype)
