"""Linear layers, whole, by filter or by channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shardwise.program import Compute
from shardwise.runtime.rules.registry import Run, crop, rule


@rule("linear")
def bind_linear(op: Compute, rank: int) -> Run:
    """Bind a linear layer; of a cut contraction only the first rank adds the bias."""
    slices = crop(op, rank, 0)
    has_bias = len(op.reads) > 2 and not op.reads[2].layout.box(rank).empty

    def run(tensors: Sequence[Any]) -> Tensor:
        x = tensors[0] if slices is None else tensors[0][slices]
        return F.linear(x, tensors[1], tensors[2] if has_bias else None)

    return run
