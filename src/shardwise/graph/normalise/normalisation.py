"""Batch, group, instance, layer and local response normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import functional as F

from shardwise.geometry.access import Access, Axis, same
from shardwise.geometry.axes import Window
from shardwise.graph import functional
from shardwise.graph.fake import Value
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.registry import rule
from shardwise.graph.site import Site


def _reads(input: Value, per: Access, **operands: Value | None) -> list[tuple[str, Value, Access]]:
    given = [(role, value) for role, value in operands.items() if value is not None]
    return [
        ("input", input, same(input.ndim)),
        *((role, value, per if value.ndim else ()) for role, value in given),
    ]


def _batch_norm(
    site: Site,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    num_batches_tracked: Value | None,
    batch_statistics: bool,
    momentum: float | None,
    eps: float,
) -> Value:
    # The counter plays no part in the shapes, and its value is not known without data.
    tensors = (input, running_mean, running_var, weight, bias)
    ran = site.run(F.batch_norm, *tensors, batch_statistics, 0.1, eps)
    args = (input, weight, bias, running_mean, running_var, num_batches_tracked)
    settings = {"batch_statistics": batch_statistics, "momentum": momentum, "eps": eps}
    reads = _reads(
        input,
        (Axis(1),),
        weight=weight,
        bias=bias,
        running_mean=running_mean,
        running_var=running_var,
        num_batches_tracked=num_batches_tracked,
    )
    return site.add(
        ran,
        (functional.batch_norm, args, settings),
        kind=Kind.NORMALISATION,
        op="batch_norm",
        reads=reads,
        attributes=settings,
    )


@rule("batch_norm")
def batch_norm(site: Site, input: Value, *args: Any, **kwargs: Any) -> Value:
    """Describe batch normalisation, from a module or from `F.batch_norm`."""
    if site.step.target is functional.batch_norm:
        return _batch_norm(site, input, *args, **kwargs)
    return _functional_batch_norm(site, input, *args, **kwargs)


def _functional_batch_norm(
    site: Site,
    input: Value,
    running_mean: Value | None,
    running_var: Value | None,
    weight: Value | None = None,
    bias: Value | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Value:
    return _batch_norm(site, input, weight, bias, running_mean, running_var, None, training, momentum, eps)


@rule("aten.batch_norm")
def aten_batch_norm(
    site: Site,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
    num_batches_tracked: Value | None = None,
) -> Value:
    """Describe aten's batch normalisation."""
    counter = num_batches_tracked
    return _batch_norm(site, input, weight, bias, running_mean, running_var, counter, training, momentum, eps)


@rule("group_norm", "aten.group_norm")
def group_norm(
    site: Site,
    input: Value,
    num_groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value:
    """Describe group normalisation."""
    return site.emit(
        F.group_norm,
        (input, num_groups, weight, bias, eps),
        {},
        kind=Kind.NORMALISATION,
        op="group_norm",
        reads=_reads(input, (Axis(1),), weight=weight, bias=bias),
        attributes={"eps": eps, "num_groups": num_groups},
    )


@rule("instance_norm")
def instance_norm(
    site: Site,
    input: Value,
    running_mean: Value | None = None,
    running_var: Value | None = None,
    weight: Value | None = None,
    bias: Value | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Value:
    """Describe instance normalisation."""
    tensors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    return site.emit(
        F.instance_norm,
        (input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps),
        {},
        kind=Kind.NORMALISATION,
        op="instance_norm",
        reads=_reads(input, (Axis(1),), **tensors),
        attributes={"eps": eps, "momentum": momentum, "instance_statistics": use_input_stats},
    )


@rule("aten.instance_norm")
def aten_instance_norm(
    site: Site,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Value:
    """Describe aten's instance normalisation."""
    return instance_norm(site, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


@rule("layer_norm", "aten.layer_norm")
def layer_norm(
    site: Site,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Value:
    """Describe layer normalisation over the last dimensions."""
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    return site.emit(
        F.layer_norm,
        (input, tuple(normalized_shape), weight, bias, eps),
        {},
        kind=Kind.NORMALISATION,
        op="layer_norm",
        reads=_reads(input, tuple(Axis(d) for d in dims), weight=weight, bias=bias),
        attributes={"eps": eps, "dims": dims},
    )


@rule("local_response_norm")
def local_response_norm(
    site: Site, input: Value, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Value:
    """Describe local response normalisation: a window over the channels."""
    access = list(same(input.ndim))
    access[1] = Axis(1, Window(size, 1, size // 2, (size - 1) // 2))
    return site.emit(
        F.local_response_norm,
        (input, size, alpha, beta, k),
        {},
        kind=Kind.NORMALISATION,
        op="local_response_norm",
        reads=[("input", input, tuple(access))],
        attributes={"size": size, "alpha": alpha, "beta": beta, "k": k},
    )
