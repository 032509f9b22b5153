"""Convolutions: plain, depthwise, separable and transposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import layers
from torch.nn import functional as F

from shardwise.graph.errors import Opaque
from shardwise.graph.keras import functional
from shardwise.graph.keras.flow import Flow, Scribe
from shardwise.graph.keras.layers.activation import activate
from shardwise.graph.keras.registry import rule
from shardwise.graph.keras.variables import is_plain
from shardwise.graph.trace import Weight

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def computes_plainly(layer: Any) -> None:
    """Refuse layers that compute in another precision than their weights have, or add to the loss."""
    if layer.compute_dtype != layer.variable_dtype:
        raise Opaque(f"weights are {layer.variable_dtype}, the layer computes in {layer.compute_dtype}")
    if layer.activity_regularizer is not None:
        raise Opaque("its activity regularizer reads the whole output")


def _convolve(
    scribe: Scribe,
    layer: Any,
    x: Flow,
    weight: Weight | None,
    bias: Weight | None,
    groups: int,
    part: str = "",
) -> Flow:
    stride, dilation = each(layer.strides, layer.rank), each(layer.dilation_rate, layer.rank)
    if layer.padding == "same":
        made = scribe.add(functional.same_conv, x.ref, weight, bias, stride, dilation, groups, part=part)
    elif layer.padding == "valid":
        target = _CONV[layer.rank]
        made = scribe.add(target, x.ref, weight, bias, stride, 0, dilation, groups, part=part)
    elif layer.padding == "causal":
        pads = ((dilation[0] * (layer.kernel_size[0] - 1), 0),)
        made = scribe.add(
            functional.padded_conv, x.ref, weight, bias, stride, pads, dilation, groups, part=part
        )
    else:
        raise Opaque(f"padding {layer.padding!r}")
    return x.made(made)


def each(value: Any, rank: int) -> tuple[int, ...]:
    """Return a setting per dimension."""
    return tuple(value) if isinstance(value, Sequence) else (value,) * rank


@rule(layers.Conv1D, layers.Conv2D, layers.Conv3D)
def _conv(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    computes_plainly(layer)
    if not is_plain(layer):
        raise Opaque("its kernel is not one variable")
    x = scribe.channels_first(x, layer.data_format)
    y = _convolve(scribe, layer, x, scribe.weight(layer.kernel), scribe.weight(layer.bias), layer.groups)
    return activate(scribe, layer.activation, y)


@rule(layers.DepthwiseConv1D, layers.DepthwiseConv2D)
def _depthwise(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    computes_plainly(layer)
    x = scribe.channels_first(x, layer.data_format)
    weight, bias = scribe.weight(layer.kernel), scribe.weight(layer.bias)
    y = _convolve(scribe, layer, x, weight, bias, layer.kernel.shape[-2])
    return activate(scribe, layer.activation, y)


@rule(layers.SeparableConv1D, layers.SeparableConv2D)
def _separable(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    computes_plainly(layer)
    x = scribe.channels_first(x, layer.data_format)
    weight = scribe.weight(layer.depthwise_kernel)
    middle = _convolve(scribe, layer, x, weight, None, layer.depthwise_kernel.shape[-2], part="depthwise")
    pointwise, bias, one = scribe.weight(layer.pointwise_kernel), scribe.weight(layer.bias), (1,) * layer.rank
    y = x.made(scribe.add(_CONV[layer.rank], middle.ref, pointwise, bias, one, 0, one, 1, part="pointwise"))
    return activate(scribe, layer.activation, y)


@rule(layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
def _transposed(scribe: Scribe, layer: Any, x: Flow) -> Flow:
    computes_plainly(layer)
    x = scribe.channels_first(x, layer.data_format)
    rank = layer.rank
    stride, dilation = each(layer.strides, rank), each(layer.dilation_rate, rank)
    added = (None,) * rank if layer.output_padding is None else each(layer.output_padding, rank)
    kernel = each(layer.kernel_size, rank)
    crops = [_crop(*sizes, layer.padding) for sizes in zip(kernel, stride, dilation, added, strict=True)]
    weight, bias = scribe.weight(layer.kernel), scribe.weight(layer.bias)
    # torch cuts as much off both ends and gives back at the far one: enough for most layers.
    more = [lo - hi for lo, hi in crops]
    native = all(lo >= 0 and 0 <= m < s for (lo, _), m, s in zip(crops, more, stride, strict=True))
    padding = tuple(lo for lo, _ in crops) if native else (0,) * rank
    extra = tuple(more) if native else (0,) * rank
    if not native and bias is not None and any(n < 0 for pair in crops for n in pair):
        raise Opaque("a transposed convolution with a bias and zeros beyond its reach")
    y = x.made(scribe.add(_TRANSPOSED[rank], x.ref, weight, bias, stride, padding, extra, 1, dilation))
    if not native:
        y = y.made(scribe.add(functional.crop, y.ref, tuple(crops), part="crop"))
    return activate(scribe, layer.activation, y)


def _crop(kernel: int, stride: int, dilation: int, added: int | None, padding: str) -> tuple[int, int]:
    """Return how much Keras cuts off each end of all that a transposed convolution can make.

    "same" makes n * stride outputs, "valid" (n - 1) * stride + max(reach, stride), and `added` changes the
    far end; the near end keeps as much as fits.
    """
    reach = (kernel - 1) * dilation + 1
    if padding == "valid":
        return (0, -(max(reach, stride) - reach if added is None else added))
    total = stride + reach - 2 if added is None else reach + reach % 2 - 2 + added
    left = min(total // 2 + total % 2, reach - 1)
    return (reach - 1 - left, reach - 1 - (total - left))
