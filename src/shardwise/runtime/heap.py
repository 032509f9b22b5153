"""Keep memory that tensors gave back, as the caching allocators of accelerators do.

Large tensors are by default mapped from the system and returned to it again and again, and every page of
such a tensor is zeroed when it is first touched: a convolution of a large image spends half of its time on
that. Allocations from a heap that is never trimmed find pages that are there.
"""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any

import torch

# Parameters of glibc's mallopt.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = -1
# With any of these the user has decided already.
_DECIDED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_memory(device: torch.device) -> bool:
    """Let this process keep what it frees, if it computes on the host; return whether that was possible.

    `SHARDWISE_KEEP_MEMORY=0`, or any of glibc's own settings in the environment, leaves all as it is.
    """
    wanted = os.environ.get("SHARDWISE_KEEP_MEMORY", "1") != "0"
    if device.type != "cpu" or not wanted or any(name in os.environ for name in _DECIDED):
        return False
    mallopt = _allocators("mallopt")
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))


def give_back() -> None:
    """Return memory that nothing uses to the system, where the allocator can."""
    gc.collect()
    trim = _allocators("malloc_trim")
    if trim is not None:
        trim(0)


def _allocators(name: str) -> Any:
    """Return a function of the C library's allocator; None where it has no such function."""
    return getattr(ctypes.CDLL(None), name, None)
