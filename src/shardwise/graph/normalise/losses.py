"""Losses: a value and a target become a number (or, with reduction "none", numbers)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import functional as F

from shardwise.geometry.access import opaque
from shardwise.graph.canonical import name_of
from shardwise.graph.errors import Opaque
from shardwise.graph.fake import Value
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.registry import rule
from shardwise.graph.site import Site

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def _loss(site: Site, op: str, tensors: Mapping[str, Value | None], settings: Mapping[str, Any]) -> Value:
    name = name_of(site.step.target)
    settings = dict(settings)
    settings["reduction"] = _REDUCTIONS.get(settings["reduction"], settings["reduction"])
    given = {role: value for role, value in tensors.items() if value is not None}
    values = [given.pop("input"), given.pop("target")]
    return site.emit(
        getattr(F, name),
        tuple(values),
        given | settings,
        kind=Kind.LOSS,
        op=op,
        reads=[
            (role, value, opaque(value.ndim))
            for role, value in zip(("input", "target", *given), (*values, *given.values()), strict=True)
        ],
        attributes=settings,
    )


def _reduction(reduction: str, size_average: Any, reduce: Any) -> str:
    if size_average is not None or reduce is not None:
        raise Opaque("a loss with size_average or reduce, which torch has deprecated: use reduction=")
    return reduction


@rule("cross_entropy")
def cross_entropy(
    site: Site,
    input: Value,
    target: Value,
    weight: Value | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Value:
    """Describe cross-entropy, on class numbers or on probabilities."""
    settings = {
        "ignore_index": ignore_index,
        "reduction": _reduction(reduction, size_average, reduce),
        "label_smoothing": label_smoothing,
    }
    return _loss(site, "cross_entropy", {"input": input, "target": target, "weight": weight}, settings)


@rule("nll_loss")
def nll_loss(
    site: Site,
    input: Value,
    target: Value,
    weight: Value | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Value:
    """Describe the negative log likelihood."""
    settings = {"ignore_index": ignore_index, "reduction": _reduction(reduction, size_average, reduce)}
    return _loss(site, "nll_loss", {"input": input, "target": target, "weight": weight}, settings)


@rule("mse_loss", "l1_loss", "soft_margin_loss")
def distance(
    site: Site,
    input: Value,
    target: Value,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Value | None = None,
) -> Value:
    """Describe losses of two tensors of one shape, without settings of their own."""
    settings = {"reduction": _reduction(reduction, size_average, reduce)}
    tensors = {"input": input, "target": target, "weight": weight}
    return _loss(site, name_of(site.step.target), tensors, settings)


@rule("smooth_l1_loss")
def smooth_l1_loss(
    site: Site,
    input: Value,
    target: Value,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Value:
    """Describe the smooth L1 loss."""
    settings = {"reduction": _reduction(reduction, size_average, reduce), "beta": beta}
    return _loss(site, "smooth_l1_loss", {"input": input, "target": target}, settings)


@rule("huber_loss")
def huber_loss(
    site: Site,
    input: Value,
    target: Value,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: Value | None = None,
) -> Value:
    """Describe the Huber loss."""
    tensors = {"input": input, "target": target, "weight": weight}
    return _loss(site, "huber_loss", tensors, {"reduction": reduction, "delta": delta})


@rule("binary_cross_entropy")
def binary_cross_entropy(
    site: Site,
    input: Value,
    target: Value,
    weight: Value | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Value:
    """Describe binary cross-entropy on probabilities."""
    settings = {"reduction": _reduction(reduction, size_average, reduce)}
    return _loss(site, "binary_cross_entropy", {"input": input, "target": target, "weight": weight}, settings)


@rule("binary_cross_entropy_with_logits")
def bce_with_logits(
    site: Site,
    input: Value,
    target: Value,
    weight: Value | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Value | None = None,
) -> Value:
    """Describe binary cross-entropy on logits."""
    settings = {"reduction": _reduction(reduction, size_average, reduce)}
    tensors = {"input": input, "target": target, "weight": weight, "pos_weight": pos_weight}
    return _loss(site, "binary_cross_entropy_with_logits", tensors, settings)


@rule("kl_div")
def kl_div(
    site: Site,
    input: Value,
    target: Value,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Value:
    """Describe the Kullback-Leibler divergence."""
    settings = {"reduction": _reduction(reduction, size_average, reduce), "log_target": log_target}
    return _loss(site, "kl_div", {"input": input, "target": target}, settings)
