"""Rectify in place where nobody can tell: a rectified value needs no memory of its own.

    convolution -> batch norm -> relu      backward reads the inputs of the first two, the output of the last

The user's own in-place calls were made out of place when the model was captured, because readers elsewhere
might see them. Inside a segment all readers are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.program import Compute, Regrid, StageProgram
from shardwise.runtime.grouping import grouped, read_behind

# They make a tensor of their own, and their backward never reads it.
_MAKERS = ("conv", "batch_norm", "add", "linear")


def rectified_in_place(
    ops: Sequence[Compute], rank: int, outside: Collection[str], landing: Collection[str]
) -> set[int]:
    """Return the positions of the operations of a segment that may overwrite what they read.

    Args:
        ops: the computations of a segment, in order.
        rank: whose part of them.
        outside: slots that are read behind the segment.
        landing: slots that are made elsewhere, inside a wider tensor.
    """
    makers = {op.makes.slot: op.layer.op for op in ops}
    readers = Counter(held.slot for op in ops for held in op.reads)
    return {
        i
        for i, op in enumerate(ops)
        if op.layer.op == "relu"
        and makers.get(op.reads[0].slot) in _MAKERS
        and readers[op.reads[0].slot] == 1
        and op.reads[0].slot not in outside
        and op.makes.slot not in landing
        and op.reads[0].stored(rank) == op.makes.layout.box(rank)
    }


def overwriting(program: StageProgram, rank: int) -> set[int]:
    """Return the positions of all operations of a stage that overwrite what they read."""
    groups = grouped(program.ops)
    landing = landing_slots(program, rank)
    found: set[int] = set()
    first = 0
    for group, outside in zip(groups, read_behind(groups, program), strict=True):
        if isinstance(group, list):
            found |= {first + i for i in rectified_in_place(group, rank, outside, landing)}
        first += len(group) if isinstance(group, list) else 1
    return found


def landing_slots(program: StageProgram, rank: int) -> set[str]:
    """Return the slots of a stage that are made inside the wider tensor that a regrid makes of them."""
    return {op.source.slot for op in program.ops if isinstance(op, Regrid) and op.lands(rank)}


def rectify(tensors: Sequence[Any]) -> Tensor:
    """Run such an operation."""
    return torch.relu_(tensors[0])
