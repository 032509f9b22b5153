"""Drive outstanding messages from a thread, where a core is spare for it.

MPI moves large messages only while somebody calls it. Between lowered operations the executor does; during
one long operation nobody would. On a machine whose cores are all computing the thread would take time from
them, so it is started only when some are left over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

_PERIOD_SECONDS = 0.5e-3


def wanted(cores: int, local_ranks: int, threads_per_rank: int) -> bool:
    """Return whether a core is spare; `SHARDWISE_PROGRESS_THREAD=0/1` overrides."""
    said = os.environ.get("SHARDWISE_PROGRESS_THREAD")
    if said is not None:
        return said == "1"
    return cores >= local_ranks * (threads_per_rank + 1)


class ProgressThread:
    """Call a function every half millisecond until stopped."""

    def __init__(self, drive: Callable[[], object]) -> None:
        self._drive = drive
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; no call is under way afterwards."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD_SECONDS):
            self._drive()
