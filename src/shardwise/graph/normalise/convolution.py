"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

import math
from typing import Any

from torch.nn import functional as F

from shardwise.geometry.access import WHOLE, Access, Axis
from shardwise.geometry.axes import Window
from shardwise.geometry.parts import Groups
from shardwise.geometry.transposed import Transposed
from shardwise.graph.errors import Opaque
from shardwise.graph.fake import Value
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.helpers import each, spatial
from shardwise.graph.normalise.registry import rule
from shardwise.graph.normalise.reshape import pad_layer
from shardwise.graph.site import Site

_FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@rule("conv1d", "conv2d", "conv3d")
def conv(
    site: Site,
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Value:
    """Describe a convolution; padding that reads the image becomes a layer of its own."""
    nd = weight.ndim - 2
    spatial(input.ndim, nd, "convolution")
    kernel = weight.shape[2:]
    stride, dilation = each(stride, nd), each(dilation, nd)
    pads = _pads(padding, kernel, dilation)
    if padding_mode != "zeros":
        input = pad_layer(site, input, ((0, 0), (0, 0), *pads), padding_mode, None)
        pads, padding = ((0, 0),) * nd, (0,) * nd
    call_padding = padding if isinstance(padding, str) else each(padding, nd)
    args = (input, weight, bias, stride, call_padding, dilation, groups)
    ran = site.run(_FORWARD[nd], *args)
    windows = tuple(Axis(d + 2, Window(kernel[d], stride[d], *pads[d], dilation[d])) for d in range(nd))
    flops = 2 * math.prod(ran.one.shape) * math.prod(weight.shape[1:])
    reads: list[tuple[str, Value, Access]] = [
        ("input", input, (Axis(0), _channels(groups, weight.shape[1], weight.shape[0] // groups), *windows)),
        ("weight", weight, (Axis(1), *(WHOLE,) * (nd + 1))),
    ]
    if bias is not None:
        reads.append(("bias", bias, (Axis(1),)))
    return site.add(
        ran,
        (_FORWARD[nd], args, {}),
        kind=Kind.CONVOLUTION,
        op="conv",
        reads=reads,
        attributes={
            "nd": nd,
            "kernel": kernel,
            "stride": stride,
            "padding": pads,
            "dilation": dilation,
            "groups": groups,
            "padding_mode": "zeros",
        },
        contracts=(((0, 1), (1, 1)),) if groups == 1 else (),
        flops=(flops, flops * (input.trained + weight.trained)),
    )


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def conv_transpose(
    site: Site,
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    output_size: Any = None,
) -> Value:
    """Describe a transposed convolution."""
    nd = weight.ndim - 2
    spatial(input.ndim, nd, "transposed convolution")
    kernel = weight.shape[2:]
    stride, padding, dilation = each(stride, nd), each(padding, nd), each(dilation, nd)
    output_padding = each(output_padding, nd)
    if output_size is not None:
        maps = [Transposed(kernel[d], stride[d], padding[d], dilation[d], 0) for d in range(nd)]
        wanted = tuple(output_size)[-nd:]
        output_padding = tuple(wanted[d] - maps[d].size(input.shape[2 + d]) for d in range(nd))
    args = (input, weight, bias, stride, padding, output_padding, groups, dilation)
    ran = site.run(_TRANSPOSED[nd], *args)
    maps = [Transposed(kernel[d], stride[d], padding[d], dilation[d], output_padding[d]) for d in range(nd)]
    flops = 2 * math.prod(input.shape) * math.prod(weight.shape[1:])
    channels = _channels(groups, weight.shape[0] // groups, weight.shape[1])
    reads: list[tuple[str, Value, Access]] = [
        ("input", input, (Axis(0), channels, *(Axis(d + 2, maps[d]) for d in range(nd)))),
        ("weight", weight, (channels, Axis(1) if groups == 1 else WHOLE, *(WHOLE,) * nd)),
    ]
    if bias is not None:
        reads.append(("bias", bias, (Axis(1),)))
    return site.add(
        ran,
        (_TRANSPOSED[nd], args, {}),
        kind=Kind.TRANSPOSED,
        op="conv_transpose",
        reads=reads,
        attributes={
            "nd": nd,
            "kernel": kernel,
            "stride": stride,
            "padding": padding,
            "output_padding": output_padding,
            "dilation": dilation,
            "groups": groups,
        },
        contracts=(((0, 1), (1, 0)),) if groups == 1 else (),
        flops=(flops, flops * (input.trained + weight.trained)),
    )


@rule("aten.convolution")
def convolution(
    site: Site,
    input: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Value:
    """Describe aten's general convolution."""
    if transposed:
        return conv_transpose(site, input, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(site, input, weight, bias, stride, padding, dilation, groups)


def _channels(groups: int, inputs: int, outputs: int) -> Axis:
    return WHOLE if groups == 1 else Axis(1, Groups(inputs, outputs))


def _pads(padding: Any, kernel: Any, dilation: Any) -> tuple[tuple[int, int], ...]:
    """Return low and high padding per dimension; "same" puts the odd one at the high end."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in total)
    if isinstance(padding, str):
        raise Opaque(f"padding {padding!r} is unknown")
    return tuple((p, p) for p in each(padding, len(kernel)))
