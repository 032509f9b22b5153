"""Map torch dtypes and reductions onto MPI's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed import ReduceOp

from shardwise.runtime.mpi.library import load

# MPI has no portable 16-bit floats. They are reduced in float32, so rounding happens once.
WIDENED = (torch.bfloat16, torch.float16)

_NAMES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.bool: "C_BOOL",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}

_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.AVG: "SUM",
    ReduceOp.PREMUL_SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}

# For truth values a sum is an "or" and a product an "and", as torch's own backends have it.
_BOOL_OPS = {
    "SUM": "LOR",
    "MAX": "LOR",
    "BOR": "LOR",
    "PROD": "LAND",
    "MIN": "LAND",
    "BAND": "LAND",
    "BXOR": "LXOR",
}


@cache
def datatype(dtype: torch.dtype) -> Any:
    """Return the MPI datatype in which elements of a dtype are reduced."""
    if dtype not in _NAMES:
        known = ", ".join(str(name).removeprefix("torch.") for name in (*_NAMES, *WIDENED))
        raise TypeError(f"reduction over MPI: {dtype} has no MPI type; reducible are {known}")
    return getattr(load(), _NAMES[dtype])


def _operation(name: str, dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        name = _BOOL_OPS[name]
    elif name in ("BAND", "BOR", "BXOR") and (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"reduction over MPI: {name} needs an integer or bool tensor, found {dtype}")
    elif name in ("MIN", "MAX") and dtype.is_complex:
        raise TypeError(f"reduction over MPI: {name} needs an ordered type, found {dtype}")
    return getattr(load(), name)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hold how tensors of a dtype are reduced: in which MPI type, by which operation, and what is left."""

    datatype: Any
    operation: Any
    widened: bool  # reduced in float32
    averaged: bool  # the sum is divided by the number of ranks
    scaled: bool  # every part is multiplied by a factor first


def recipe(op: Any, dtype: torch.dtype) -> Recipe:
    """Return how a reduction is carried out."""
    # Comparing and hashing torch's enum costs more than the reduction of a small tensor.
    return _recipe(op.op.value, dtype)


@cache
def _recipe(value: int, dtype: torch.dtype) -> Recipe:
    kind = ReduceOp.RedOpType(value)
    widened = dtype in WIDENED
    reduced_in = torch.float32 if widened else dtype
    return Recipe(
        datatype(reduced_in),
        _operation(_OPS[kind], reduced_in),
        widened,
        kind == ReduceOp.AVG,
        kind == ReduceOp.PREMUL_SUM,
    )


def factor(op: Any) -> Any:
    """Return the number or tensor each rank's part is multiplied with before a scaled sum."""
    return op.__getstate__()[1]
