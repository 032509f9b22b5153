"""How images lie in memory: channels first, as torch makes them, or channels last.

Which one convolutions prefer depends on the processor and on its library, and what a network gains or
loses by it is more than a halo costs. So the ranks of a job agree on the order that a short trial finds
faster, and everything that makes an image (inputs, halos, messages between stages) makes it in that order.
Operators keep the order of what they read. Values have the same indices in either.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.graph import Kind, Layer
from shardwise.program import Compute, Op

SETTING = "SHARDWISE_MEMORY_ORDER"
# Images have four dimensions: samples, channels, rows, columns. Volumes gained nothing by another order.
_IMAGE = 4
_TO_LAST, _TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
# The trial: (channels read, channels made, kernel, pixels), and how much better the unusual order must be.
_TRIAL = ((32, 32, 3, 256), (64, 64, 3, 128), (256, 64, 1, 64), (64, 256, 1, 64))
_CONVOLUTIONS = ("conv", "conv_transpose")
_ROUNDS, _BETTER = 4, 0.97


@dataclass(frozen=True)
class Order:
    """Make tensors whose images have their channels last, or leave everything to torch."""

    last: bool = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor without values."""
        return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=self._format(len(shape)))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor of zeros."""
        if self._turns(len(shape)):
            return self.empty(shape, dtype, device).zero_()
        return torch.zeros(tuple(shape), dtype=dtype, device=device)

    def arranged(self, tensor: Tensor) -> Tensor:
        """Return a tensor in this order, itself if it may lie as it does."""
        return tensor.contiguous(memory_format=torch.channels_last) if self._turns(tensor.ndim) else tensor

    def row(self, tensor: Tensor) -> Tensor:
        """Return the elements of a tensor in a row, as they lie in memory if nothing lies between."""
        return (tensor.permute(_TO_LAST) if self._turns(tensor.ndim) else tensor).reshape(-1)

    def shaped(self, row: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a view of such a row as a tensor of a shape."""
        if not self._turns(len(shape)):
            return row.view(tuple(shape))
        return row.view([shape[d] for d in _TO_LAST]).permute(_TO_FIRST)

    def settle(self, ops: Iterable[Op], tensors: Mapping[str, Tensor], width: int) -> None:
        """Bring the kernels of convolutions into this order, where they are; their values stay.

        The gradient of a kernel with channels last is turned around by slow copies. So kernels of several
        pixels that are larger than the images they meet stay as they are, and those images are turned.

        Args:
            ops: the operations of a stage, for the largest of its micro-batches.
            tensors: parameters by name, of which no other tensor shares the memory.
            width: ranks of the stage's group.
        """
        for op in ops if self.last else ():
            if not isinstance(op, Compute) or op.layer.op not in _CONVOLUTIONS or op.layer.kind is Kind.OTHER:
                continue
            image, kernel = (operand.spec.shape for operand in op.layer.operands[:2])
            tensor = tensors.get(op.layer.operands[1].source)
            if not isinstance(tensor, nn.Parameter) or tensor.ndim != _IMAGE:
                continue
            if tensor.is_contiguous():
                pixels = (math.prod(image) + math.prod(op.layer.shape)) // width
                if math.prod(kernel) <= pixels:
                    tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)

    def _turns(self, ndim: int) -> bool:
        return self.last and ndim == _IMAGE

    def _format(self, ndim: int) -> torch.memory_format:
        return torch.channels_last if self._turns(ndim) else torch.contiguous_format


FIRST, LAST = Order(False), Order(True)
_NAMED = {"first": FIRST, "last": LAST}


def order_of(
    name: str, layers: Iterable[Layer], device: torch.device, rank: int, agree: Callable[[float], float]
) -> Order:
    """Return the order with a name; `auto` is what the first rank finds faster.

    The environment may name it too, for jobs whose script says nothing.

    Args:
        name: `auto`, `first` or `last`.
        layers: what will be computed.
        device: where.
        rank: who we are.
        agree: returns on all ranks what the first one gives.
    """
    told = os.environ.get(SETTING, name) if name == "auto" else name
    if told not in ("auto", *_NAMED):
        raise ValueError(f"memory_order: found {told!r}; expected auto, {', '.join(_NAMED)}")
    read = (layer.operands[0].spec for layer in layers if layer.op == "conv" and layer.operands)
    dtypes = [getattr(torch, spec.dtype) for spec in read if len(spec.shape) == _IMAGE and spec.is_float]
    if not dtypes:
        return FIRST
    mine = _NAMED[told] if told in _NAMED else fastest(device, dtypes[0]) if rank == 0 else FIRST
    agreed = LAST if agree(float(rank == 0 and mine.last)) else FIRST
    if told in _NAMED and agreed != mine:
        other = next(word for word, order in _NAMED.items() if order == agreed)
        raise ValueError(
            f"memory_order: rank {rank} was told {told!r}, rank 0 uses {other!r}; tell all the same"
        )
    return agreed


def memory_code(tensor: Tensor) -> int:
    """Return a number that is equal for tensors whose elements lie in the same order."""
    strides = tensor.stride()
    dims = [d for d in range(tensor.ndim) if tensor.shape[d] > 1]
    code = 0
    for dim in sorted(dims, key=lambda d: -strides[d]):
        code = 8 * code + dim + 1
    return code


@lru_cache(maxsize=8)
def fastest(device: torch.device, dtype: torch.dtype) -> Order:
    """Convolve in both orders, forwards and backwards; return the faster one."""
    if dtype is torch.float64 and device.type == "cpu":
        # Convolutions of 64 bits do not run in the library that knows the other order.
        return FIRST
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        steps = {order: _steps(order, device, dtype) for order in (FIRST, LAST)}
        seconds: dict[Order, list[float]] = {order: [math.inf] * len(_TRIAL) for order in steps}
        for _ in range(_ROUNDS):
            for order, mine in steps.items():
                for i, step in enumerate(mine):
                    seconds[order][i] = min(seconds[order][i], _time(step, device))
    return LAST if sum(seconds[LAST]) < _BETTER * sum(seconds[FIRST]) else FIRST


def _steps(order: Order, device: torch.device, dtype: torch.dtype) -> list[Callable[[], None]]:
    return [_step(order, device, dtype, *sizes) for sizes in _TRIAL]


def _step(
    order: Order, device: torch.device, dtype: torch.dtype, reads: int, makes: int, kernel: int, pixels: int
) -> Callable[[], None]:
    made = torch.ones((1, reads, pixels, pixels), dtype=dtype, device=device)
    image = order.arranged(made).requires_grad_()
    weight = order.arranged(torch.ones((makes, reads, kernel, kernel), dtype=dtype, device=device))
    weight.requires_grad_()
    gradient = order.arranged(torch.ones((1, makes, pixels, pixels), dtype=dtype, device=device))

    def run() -> None:
        image.grad = weight.grad = None
        F.conv2d(image, weight, padding=kernel // 2).backward(gradient)  # type: ignore[no-untyped-call]

    return run


def _time(step: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start
