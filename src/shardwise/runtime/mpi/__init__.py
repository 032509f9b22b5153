"""The `mpi4py` backend of `torch.distributed`.

Nothing here imports `mpi4py.MPI` before the backend is chosen, because that import starts MPI.
"""

from __future__ import annotations

from shardwise.runtime.mpi.register import BACKEND, group_comm, poller, register

__all__ = ["BACKEND", "group_comm", "poller", "register"]
