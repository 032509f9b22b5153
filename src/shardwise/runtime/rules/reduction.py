"""Sums and means, whole or as this rank's summand of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.program import Compute
from shardwise.program.replica_sum import REPLICA_SUM
from shardwise.runtime.rules.registry import Run, cropped, rule


@rule("mean", "sum")
def bind_reduction(op: Compute, rank: int) -> Run:
    """Bind a sum; a mean is a local mean times this rank's part of the values, so that summands add up to it.

    (Dividing a sum would overflow in 16 bits.)
    """
    attributes = op.layer.attributes
    dims, keepdim = tuple(attributes["dims"]), bool(attributes["keepdim"])
    shape = op.layer.operands[0].spec.shape
    count = math.prod(shape[d] for d in dims)
    means = op.layer.op == "mean"
    dtype = op.layer.call.kwargs.get("dtype") if op.layer.call is not None else None
    pick = cropped(op, rank)

    def run(tensors: Sequence[Any]) -> Tensor:
        x: Tensor = pick(tensors)[0]
        local = math.prod(x.shape[d] for d in dims)
        # A share without values has no mean; its zero counts for nothing.
        if not means or not local:
            return x.sum(dims, keepdim=keepdim, dtype=dtype)
        mean = x.mean(dims, keepdim=keepdim, dtype=dtype)
        return mean if local == count else mean * (local / count)

    return run


@rule(REPLICA_SUM)
def bind_replica_sum(op: Compute, rank: int) -> Run:
    """Leave the value of a micro-batch that has no samples in any replica as it is."""
    pick = cropped(op, rank)
    return lambda tensors: pick(tensors)[0]
