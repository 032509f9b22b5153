"""The process group: all families of operations together."""

from __future__ import annotations

from shardwise.runtime.mpi.exchanges import Exchanges
from shardwise.runtime.mpi.point_to_point import PointToPoint
from shardwise.runtime.mpi.reductions import Reductions
from shardwise.runtime.mpi.shelf import Shelf, put_up_shelf
from shardwise.runtime.mpi.table import Table, lay_table


class MPIGroup(PointToPoint, Reductions, Exchanges):
    """A `torch.distributed` process group whose messages travel over MPI."""

    shelf: Shelf | None = None
    _table: Table | None = None
    _asked = _prepared = False

    def table(self) -> Table | None:
        """Return the table for small sums, if all are on one node; the first call is collective."""
        if not self._asked:
            self._asked = True
            self._table = lay_table(self.direct, self.members, self.me, self.poller)
        return self._table

    def prepare_sums(self) -> None:
        """Let large sums go through shared memory, if all are on one node; the first call is collective."""
        if not self._prepared:
            self._prepared = True
            self.shelf = put_up_shelf(self.direct, self.members, self.me, self.poller)
