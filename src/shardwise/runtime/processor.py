"""Read how much processor time processes have used, in the kernel's ticks."""

from __future__ import annotations

import os
import time
from contextlib import suppress

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Behind the name in /proc/<pid>/stat: of the process itself, and of its children that have ended.
_OWN, _ENDED = slice(11, 13), slice(13, 15)


def ticks_of(pid: int) -> int | None:
    """Return the processor time of a process of this node, or None where it cannot be read."""
    return _ticks(pid, _OWN)


def ticks_of_children(pid: int) -> int:
    """Return the processor time of all that a process started, and that those started."""
    total = _ticks(pid, _ENDED) or 0
    for child in _children(pid):
        total += (_ticks(child, _OWN) or 0) + ticks_of_children(child)
    return total


class Helpers:
    """Tell whether the processes that this one started, such as those that load data, are at work."""

    def __init__(self) -> None:
        self._ticks, self._time = 0, 0.0

    def share(self) -> float:
        """Return how much of a core they used since the last call; the first call knows nothing yet."""
        ticks, now = ticks_of_children(os.getpid()), time.monotonic()
        used, passed = (ticks - self._ticks) / _TICKS_PER_SECOND, now - self._time
        known, self._ticks, self._time = self._time > 0.0, ticks, now
        return used / max(passed, 1e-6) if known else 0.0


def _ticks(pid: int, fields: slice) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return sum(int(field) for field in stat.read().rpartition(")")[2].split()[fields])
    except OSError:
        return None


def _children(pid: int) -> list[int]:
    found: list[int] = []
    # Whatever ends meanwhile is counted by its parent.
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as children:
                found += [int(child) for child in children.read().split()]
    return found
