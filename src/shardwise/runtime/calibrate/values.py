"""Tensors to measure with: parameters, buffers and gradients of usual sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.graph import Source
from shardwise.program import Regrid
from shardwise.runtime.calibrate.chains import Chain

SMALL = 1e-3
_RATE = 1e-12


def stored(chain: Chain) -> dict[str, Tensor]:
    """Make the parameters and buffers of a chain, with values of a usual size."""
    program, rank = chain.program, chain.rank
    result: dict[str, Tensor] = {}
    for op in chain.ops:
        if isinstance(op, Regrid):
            continue
        for operand, held in zip(op.layer.operands, op.reads, strict=True):
            if operand.origin is Source.VALUE or operand.source in result:
                continue
            layouts = program.parameters if operand.origin is Source.PARAMETER else program.buffers
            shape = layouts[operand.source].box(rank).shape
            dtype = getattr(torch, operand.spec.dtype)
            if not dtype.is_floating_point:
                result[operand.source] = torch.zeros(shape, dtype=dtype)
            elif operand.origin is Source.PARAMETER:
                # A mean of what is read: values keep their size however deep the chain is.
                value = torch.full(shape, 1.0 / max(1, math.prod(shape[1:])), dtype=dtype)
                result[operand.source] = nn.Parameter(value, requires_grad=held.grad)
            else:
                result[operand.source] = torch.ones(shape, dtype=dtype)
    return result


class Weights:
    """Parameters that chains share, since they are used in turn, and the optimizer's memory of them."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Tensor] = {}
        self._momenta: dict[int, Tensor] = {}

    def share(self, tensors: dict[str, Tensor]) -> None:
        """Put parameters that lie in memory as earlier ones of that name in place of new ones."""
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                key = (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
                tensors[name] = self._known.setdefault(key, tensor)

    def update(self, tensor: Tensor) -> None:
        """Do to a parameter, which `share` has seen, what SGD with momentum does."""
        if id(tensor) not in self._momenta:
            self._momenta[id(tensor)] = torch.zeros_like(tensor)
        momentum = self._momenta[id(tensor)]
        assert tensor.grad is not None
        momentum.mul_(0.9).add_(tensor.grad)
        # So little that values keep their size.
        tensor.data.add_(momentum, alpha=-_RATE)


def seed(shape: Sequence[int], dtype: Any) -> Tensor:
    """Return a gradient of a usual size."""
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return torch.full(tuple(shape), SMALL, dtype=kind)
