"""The `mpi4py` backend of `torch.distributed`.

Nothing here imports `mpi4py.MPI` before the backend is chosen, because that import starts MPI; and nothing
imports torch before it is needed, because the launcher uses this folder too and shall start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.runtime.mpi.registration import BACKEND, group_comm, poller, register

__all__ = ["BACKEND", "group_comm", "poller", "register"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("shardwise.runtime.mpi.registration"), name)
