"""Hand tensors to MPI: as they are where possible, through a contiguous host copy otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.mpi.library import cuda_aware, load

Finish = Callable[[], None]


def direct(tensor: Tensor) -> bool:
    """Return whether MPI may touch the tensor's own memory."""
    return tensor.is_contiguous() and (tensor.is_cpu or cuda_aware())


def settle(tensor: Tensor) -> None:
    """Return when what was asked of the tensor's device has been done: MPI knows nothing of streams."""
    if not tensor.is_cpu:
        torch.accelerator.current_stream(tensor.device).synchronize()


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it, whose memory MPI may read."""
    if tensor.is_cpu:
        return tensor if tensor.is_contiguous() else tensor.contiguous()
    if cuda_aware():
        packed = tensor.contiguous()
        settle(packed)
        return packed
    return tensor.contiguous().cpu()


def writable(tensor: Tensor) -> tuple[Tensor, Finish | None]:
    """Return memory MPI may write for the tensor, and what copies it back, if it is not its own."""
    if direct(tensor):
        settle(tensor)
        return tensor, None
    device = tensor.device if cuda_aware() else torch.device("cpu")
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    settle(staged)
    return staged, lambda: _copy(tensor, staged)


def flat_writable(tensors: Sequence[Tensor]) -> tuple[Tensor, Finish]:
    """Return one flat buffer for several tensors, and what hands each its part."""
    device = tensors[0].device if cuda_aware() else torch.device("cpu")
    total = sum(tensor.numel() for tensor in tensors)
    flat = torch.empty(total, dtype=tensors[0].dtype, device=device)
    settle(flat)

    def finish() -> None:
        start = 0
        for tensor in tensors:
            _copy(tensor, flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()

    return flat, finish


def flat_readable(tensors: Sequence[Tensor]) -> Tensor:
    """Return one flat buffer that holds several tensors one after another."""
    if len(tensors) == 1:
        return readable(tensors[0]).view(-1)
    return readable(torch.cat([tensor.reshape(-1) for tensor in tensors]))


def memory(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor as MPI's buffer, without a copy."""
    return load().memory.fromaddress(tensor.data_ptr(), tensor.nbytes)


def _copy(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)
