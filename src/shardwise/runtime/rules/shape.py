"""Layers that only rearrange elements: the sizes in the user's call are global, the tensors are local."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.program import Compute
from shardwise.runtime.rules.registry import Run, cropped, rule


@rule("reshape")
def bind_reshape(op: Compute, rank: int) -> Run:
    """Bind a reshape; the dimensions that are cut survive it, so the local box gives the local shape."""
    shape = op.makes.layout.box(rank).shape
    pick = cropped(op, rank)

    def run(tensors: Sequence[Any]) -> Tensor:
        result: Tensor = pick(tensors)[0].reshape(shape)
        return result

    return run
