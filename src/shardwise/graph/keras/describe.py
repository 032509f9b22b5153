"""The geometry of Keras's own functions: "same" padding, biased variances, reshapes of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.nn import functional as F

from shardwise.geometry.access import WHOLE, Access, Axis, same
from shardwise.geometry.axes import Window
from shardwise.geometry.parts import Groups
from shardwise.graph.fake import Value
from shardwise.graph.keras import functional
from shardwise.graph.keras.functional import Pads
from shardwise.graph.layer import Kind
from shardwise.graph.normalise import convolution
from shardwise.graph.normalise.registry import rule
from shardwise.graph.normalise.reshape import pad_layer, reshape_layer
from shardwise.graph.normalise.slices import slice_layer
from shardwise.graph.site import Site

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@rule("padded_conv")
def padded_conv(
    site: Site,
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    pads: Pads,
    dilation: Sequence[int],
    groups: int,
) -> Value:
    """Describe a convolution whose padding may differ at the two ends."""
    if all(lo == hi for lo, hi in pads):
        padding = tuple(lo for lo, _ in pads)
        return convolution.conv(site, input, weight, bias, stride, padding, dilation, groups)
    nd, kernel, pads = weight.ndim - 2, weight.shape[2:], tuple(pads)
    args = (input, weight, bias, stride, pads, dilation, groups)
    ran = site.run(functional.padded_conv, *args)
    channels = WHOLE if groups == 1 else Axis(1, Groups(weight.shape[1], weight.shape[0] // groups))
    windows = [Axis(d + 2, Window(kernel[d], stride[d], *pads[d], dilation[d])) for d in range(nd)]
    reads: list[tuple[str, Value, Access]] = [
        ("input", input, (Axis(0), channels, *windows)),
        ("weight", weight, (Axis(1), *(WHOLE,) * (nd + 1))),
    ]
    if bias is not None:
        reads.append(("bias", bias, (Axis(1),)))
    flops = 2 * math.prod(ran.one.shape) * math.prod(weight.shape[1:])
    return site.add(
        ran,
        (functional.padded_conv, args, {}),
        kind=Kind.CONVOLUTION,
        op="conv",
        reads=reads,
        attributes={
            "nd": nd,
            "kernel": kernel,
            "stride": tuple(stride),
            "padding": pads,
            "dilation": tuple(dilation),
            "groups": groups,
            "padding_mode": "zeros",
        },
        contracts=(((0, 1), (1, 1)),) if groups == 1 else (),
        flops=(flops, flops * (input.trained + weight.trained)),
    )


@rule("same_conv")
def same_conv(
    site: Site,
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Value:
    """Describe a convolution with "same" padding."""
    pads = functional.same_pads(input.shape[2:], weight.shape[2:], stride, dilation)
    return padded_conv(site, input, weight, bias, stride, pads, dilation, groups)


def _pool(
    site: Site, input: Value, which: str, kernel: Sequence[int], stride: Sequence[int], pads: Pads
) -> Value:
    nd, kernel, stride, pads = len(kernel), tuple(kernel), tuple(stride), tuple(pads)
    even = tuple(lo for lo, _ in pads) if all(lo == hi for lo, hi in pads) else None
    call: tuple[Any, tuple[Any, ...]]
    if which == "avg":
        call = _AVG[nd], (input, kernel, stride, even, False, False)
    elif even is not None:
        call = _MAX[nd], (input, kernel, stride, even)
    else:
        call = functional.padded_max_pool, (input, kernel, stride, pads)
    windows = [Axis(d + 2, Window(kernel[d], stride[d], *pads[d])) for d in range(nd)]
    return site.emit(
        call[0],
        call[1],
        {},
        kind=Kind.POOLING,
        op=f"{which}_pool",
        reads=[("input", input, (Axis(0), Axis(1), *windows))],
        attributes={
            "nd": nd,
            "kernel": kernel,
            "stride": stride,
            "padding": pads,
            "dilation": (1,) * nd,
            "ceil_mode": False,
            "count_include_pad": which == "max",
            "divisor": None,
        },
    )


@rule("same_max_pool")
def same_max_pool(site: Site, input: Value, kernel: Sequence[int], stride: Sequence[int]) -> Value:
    """Describe maximum pooling with "same" padding."""
    pads = functional.same_pads(input.shape[2:], kernel, stride, (1,) * len(kernel))
    return _pool(site, input, "max", kernel, stride, pads)


@rule("same_avg_pool")
def same_avg_pool(site: Site, input: Value, kernel: Sequence[int], stride: Sequence[int]) -> Value:
    """Describe average pooling with "same" padding.

    Padding does not count; but where its two ends differ, Keras on torch repeats the border and counts it.
    """
    pads = functional.same_pads(input.shape[2:], kernel, stride, (1,) * len(kernel))
    if any(lo != hi for lo, hi in pads):
        input = pad_layer(site, input, ((0, 0), (0, 0), *pads), "replicate", None)
        pads = ((0, 0),) * len(pads)
    return _pool(site, input, "avg", kernel, stride, pads)


@rule("keras_batch_norm")
def batch_norm(
    site: Site,
    input: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    batch_statistics: bool,
    momentum: float,
    eps: float,
) -> Value:
    """Describe Keras's batch normalisation."""
    ran = site.run(F.batch_norm, input, running_mean, running_var, weight, bias, batch_statistics, 0.1, eps)
    given = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    reads: list[tuple[str, Value, Access]] = [("input", input, same(input.ndim))]
    reads += [(role, value, (Axis(1),)) for role, value in given.items() if value is not None]
    settings = {"batch_statistics": batch_statistics, "momentum": momentum, "eps": eps}
    args = (input, weight, bias, running_mean, running_var)
    return site.add(
        ran,
        (functional.keras_batch_norm, args, settings),
        kind=Kind.NORMALISATION,
        op="batch_norm",
        reads=reads,
        attributes={**settings, "unbiased": False},
    )


@rule("reshape_samples")
def reshape_samples(site: Site, input: Value, shape: Sequence[int]) -> Value:
    """Describe a reshape that keeps the samples apart."""
    sizes = [int(n) for n in shape]
    if -1 in sizes:
        rest = math.prod(n for n in sizes if n != -1)
        sizes[sizes.index(-1)] = math.prod(input.shape[1:]) // max(1, rest)
    return reshape_layer(site, input, (input.shape[0], *sizes))


@rule("crop")
def crop(site: Site, input: Value, crops: Pads) -> Value:
    """Describe cut-off borders; negative ones add zeros."""
    first = input.ndim - len(crops)
    crops = [(0, 0)] * first + list(crops)
    cut = [(max(0, lo), max(0, hi)) for lo, hi in crops]
    if any(map(any, cut)):
        stops = [n - hi for n, (_, hi) in zip(input.shape, cut, strict=True)]
        input = slice_layer(site, input, [lo for lo, _ in cut], stops, [1] * input.ndim)
    return pad_layer(site, input, [(max(0, -lo), max(0, -hi)) for lo, hi in crops], "constant", None)


@rule("drop_samples")
def drop_samples(site: Site, input: Value, p: float) -> Value:
    """Describe dropout of whole samples."""
    return site.emit(
        functional.drop_samples,
        (input, p),
        {},
        kind=Kind.DROPOUT,
        op="dropout",
        reads=[("input", input, same(input.ndim))],
        attributes={"p": p, "per": "sample"},
    )
