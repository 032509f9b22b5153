"""Stand-ins for tensors whose memory is no longer needed."""

from __future__ import annotations

import torch
from torch import Tensor


def hollow(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and order in memory that has no memory.

    Autograd gives a gradient the order of its leaf; a mixture of orders costs convolutions a copy each.
    """
    strides = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    if strides == sorted(strides, reverse=True):
        # Row after row, perhaps with gaps between them.
        return tensor.new_empty(()).expand(tensor.shape)
    result = torch.empty_like(tensor)
    result.untyped_storage().resize_(0)
    return result
