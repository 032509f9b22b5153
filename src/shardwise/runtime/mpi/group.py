"""The process group: all families of operations together."""

from __future__ import annotations

from shardwise.runtime.mpi.exchanges import Exchanges
from shardwise.runtime.mpi.point_to_point import PointToPoint
from shardwise.runtime.mpi.reductions import Reductions
from shardwise.runtime.mpi.table import Table, lay_table


class MPIGroup(PointToPoint, Reductions, Exchanges):
    """A `torch.distributed` process group whose messages travel over MPI."""

    _table: Table | None = None
    _asked = False

    def table(self) -> Table | None:
        """Return the table for small sums, if all are on one node; the first call is collective."""
        if not self._asked:
            self._asked = True
            self._table = lay_table(self.direct, self.members, self.me, self.poller)
        return self._table
