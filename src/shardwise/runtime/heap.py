"""Keep memory that tensors gave back, as the caching allocators of accelerators do.

Large tensors are by default mapped from the system and returned to it again and again, and every page of
such a tensor is zeroed when it is first touched: a convolution of a large image spends half of its time on
that. Allocations from a heap that is never trimmed find pages that are there.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os

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
    name = ctypes.util.find_library("c")
    mallopt = getattr(ctypes.CDLL(name), "mallopt", None) if name else None
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))
