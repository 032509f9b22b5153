"""What Keras computes and torch has no single function for; `describe.py` knows their geometry."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Pads = Sequence[tuple[int, int]]
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def same_pads(
    sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the padding with which there are ceil(n / stride) outputs, the odd one at the end."""
    pads = []
    for n, k, s, d in zip(sizes, kernel, stride, dilation, strict=True):
        total = max(0, (math.ceil(n / s) - 1) * s + d * (k - 1) + 1 - n)
        pads.append((total // 2, total - total // 2))
    return tuple(pads)


def flat(pads: Pads) -> list[int]:
    """Return pads in the order of `F.pad`: last dimension first."""
    return [n for pair in reversed(pads) for n in pair]


def padded_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    pads: Pads,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve with padding that may differ at the two ends."""
    nd = weight.ndim - 2
    return _CONV[nd](F.pad(input, flat(pads)), weight, bias, tuple(stride), 0, tuple(dilation), groups)


def same_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Convolve with Keras's "same" padding."""
    pads = same_pads(input.shape[2:], weight.shape[2:], stride, dilation)
    return padded_conv(input, weight, bias, stride, pads, dilation, groups)


def padded_max_pool(input: Tensor, kernel: Sequence[int], stride: Sequence[int], pads: Pads) -> Tensor:
    """Pool maxima with padding, which never wins."""
    result: Tensor = _MAX[len(kernel)](
        F.pad(input, flat(pads), value=float("-inf")), tuple(kernel), tuple(stride)
    )
    return result


def same_max_pool(input: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Pool maxima with Keras's "same" padding."""
    pads = same_pads(input.shape[2:], kernel, stride, (1,) * len(kernel))
    return padded_max_pool(input, kernel, stride, pads)


def same_avg_pool(input: Tensor, kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Pool averages with Keras's "same" padding."""
    raise TypeError("described as padding and pooling, never called")


def keras_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batch_statistics: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """Normalise like Keras, whose average of variances takes the batch's own, not the sample estimate."""
    if not batch_statistics:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    count = input.numel() // input.shape[1]
    if count == 1:
        # One value per channel is its own mean; torch refuses to normalise that.
        with torch.no_grad():
            running_mean.lerp_(input.detach().reshape(-1), momentum)
            running_var.mul_(1.0 - momentum)
        mean, var = input.detach().reshape(-1), torch.zeros_like(running_var)
        centred = input - input
        return F.batch_norm(centred, torch.zeros_like(mean), var, weight, bias, False, 0.0, eps)
    # With momentum 1 torch leaves the batch's own statistics, in scratch that autograd may remember.
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    y = F.batch_norm(input, mean, var, weight, bias, True, 1.0, eps)
    with torch.no_grad():
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * ((count - 1) / count), momentum)
    return y


def reshape_samples(input: Tensor, shape: Sequence[int]) -> Tensor:
    """Give each sample another shape."""
    return input.reshape(input.shape[0], *shape)


def crop(input: Tensor, crops: Pads) -> Tensor:
    """Cut borders off, one pair per dimension; a negative one adds zeros."""
    return F.pad(input, [-n for n in flat(crops)])


def drop_samples(input: Tensor, p: float) -> Tensor:
    """Drop whole samples and scale up the others."""
    mask = F.dropout(input.new_ones(input.shape[0], *(1,) * (input.ndim - 1)), p)
    return input * mask
