"""Convolution of single pixels as what it is: the product of a table of pixels with a matrix.

With channels last an image is that table, one row a pixel, without a copy. torch takes a way through its
oldest kernel there, which clears every gradient before it overwrites it. oneDNN is faster where the image
is much larger than the kernel; for the others bringing the kernel into its blocks takes longer than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

_EXACT = (torch.float32, torch.float64)
# How many times as large as the kernel the image and the result must be for oneDNN.
_LARGER = 8


def is_table(x: Tensor) -> bool:
    """Tell whether an image on the host is a table of pixels, and nobody watches what is done with it."""
    if not x.is_cpu or x.ndim != 4 or x.shape[1] == 1 or x.dtype not in _EXACT or not x.numel():
        return False
    # Weights that are put off are found by a watcher of torch's functions.
    return x.is_contiguous(memory_format=torch.channels_last) and not has_torch_function((x,))


def is_single(weight: Tensor, settings: Sequence[Sequence[int]], groups: int) -> bool:
    """Tell whether a kernel of one pixel meets every pixel once, by its stride and padding."""
    stride, padding = settings
    return weight.shape[2:] == (1, 1) and tuple(stride) == (1, 1) and not any(padding) and groups == 1


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve such an image with a kernel of one pixel."""
    made: Tensor = _Pointwise.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return made


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients(grads[0], x, weight, ctx.needs_input_grad)


def gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the image, the kernel and the bias, as far as they are wanted."""
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    for_x, for_weight, for_bias = wanted
    return (
        product(gradient, weight.transpose(0, 1), None) if for_x else None,
        (_rows(gradient).t() @ _rows(x)).view(weight.shape) if for_weight else None,
        _rows(gradient).sum(0) if for_bias else None,
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the image whose channels are sums of the channels of another one."""
    made, read = weight.shape[:2]
    n, _, height, width = x.shape
    large = _LARGER * made * read <= n * height * width * (made + read)
    if large and x.dtype is torch.float32 and _has_library():
        # Kernels of one pixel lie alike in both orders; this says so.
        kernel = weight.contiguous(memory_format=torch.channels_last)
        return torch.mkldnn_convolution(x, kernel, bias, (0, 0), (1, 1), (1, 1), 1)
    matrix = weight.reshape(made, read).t()
    # Not a view of the product: readers may overwrite it.
    result = torch.empty((n, made, height, width), dtype=x.dtype, memory_format=torch.channels_last)
    if bias is None:
        torch.mm(_rows(x), matrix, out=_rows(result))
    else:
        torch.addmm(bias, _rows(x), matrix, out=_rows(result))
    return result


def _has_library() -> bool:
    library = torch.backends.mkldnn
    return bool(library.enabled and library.is_available())  # type: ignore[no-untyped-call]


def _rows(x: Tensor) -> Tensor:
    """Return the pixels of an image as rows."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
