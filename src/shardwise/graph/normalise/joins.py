"""Concatenation and stacking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.geometry.access import Axis, same
from shardwise.geometry.parts import Part
from shardwise.graph.fake import Value
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.helpers import tensor
from shardwise.graph.normalise.registry import rule
from shardwise.graph.normalise.reshape import unsqueeze
from shardwise.graph.site import Site


@rule("cat", "concat", "concatenate")
def cat(site: Site, tensors: Sequence[Any], dim: int = 0) -> Value:
    """Describe a concatenation: every operand is a part of the output."""
    values = [tensor(v, "an operand of cat") for v in tensors]
    # Old habit of torch: an empty vector joins anything.
    values = [v for v in values if v.shape != (0,)] or values
    dim %= max(1, values[0].ndim)
    reads, at = [], 0
    for i, value in enumerate(values):
        access = list(same(value.ndim))
        access[dim] = Axis(dim, Part(-at, sum(v.shape[dim] for v in values)))
        reads.append((f"input{i}", value, tuple(access)))
        at += value.shape[dim]
    args = (tuple(values), dim)
    return site.emit(torch.cat, args, {}, kind=Kind.JOIN, op="cat", reads=reads, attributes={"dim": dim})


@rule("stack")
def stack(site: Site, tensors: Sequence[Any], dim: int = 0) -> Value:
    """Describe stacking as a concatenation along a new dimension."""
    values = [tensor(v, "an operand of stack") for v in tensors]
    dim %= values[0].ndim + 1
    return cat(site, [unsqueeze(site, v, dim, ".unsqueeze") for v in values], dim)
