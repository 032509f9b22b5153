"""The process group: all families of operations together."""

from __future__ import annotations

from shardwise.runtime.mpi.exchanges import Exchanges
from shardwise.runtime.mpi.point_to_point import PointToPoint
from shardwise.runtime.mpi.reductions import Reductions


class MPIGroup(PointToPoint, Reductions, Exchanges):
    """A `torch.distributed` process group whose messages travel over MPI."""
