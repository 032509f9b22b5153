"""Wake a sleeping rank of the same node when a message for it was sent.

With more ranks than cores a rank that waits for long must sleep, or it takes time from those that compute.
Timers wake it late (50-150 us, whatever was asked for); a semaphore in shared memory wakes it as fast as the
kernel can switch to it, and costs a sender nothing but one look while nobody sleeps.

    memory of a node, one slot per rank of the job:   | semaphore (32 bytes) | asleep? |  | ...

    sleeper: asleep = 1, test, wait on the semaphore        sender: send, then if asleep: asleep = 0, post

The sleeper tests once more after it said so, hence a message sent in between is not missed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable

# From about this size a send is complete only when its receiver says so: the receiver rings back.
ANSWERED_BYTES = 16 << 10

_SLOT_BYTES = 64
_FLAG = 32
# Without and with giving the interpreter's lock away: posting is too short for that, waiting is not.
_quick, _patient = ctypes.PyDLL(None), ctypes.CDLL(None)


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_post = _quick.sem_post
_post.argtypes = (ctypes.c_void_p,)
_make = _quick.sem_init
_make.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)


def _waiting() -> tuple[Callable[[int, _Time], object], Callable[[], float]]:
    """Return how to wait on a semaphore and the clock that goes by: where possible one that nobody sets."""
    wait = getattr(_patient, "sem_clockwait", None)
    if wait is None:
        wait = _patient.sem_timedwait
        wait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Time))
        return wait, time.time
    wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Time))
    return lambda own, until: wait(own, time.CLOCK_MONOTONIC, until), time.monotonic


_wait, _clock = _waiting()


class Bell:
    """Hold this rank's own bell and ring those of the other ranks on its node."""

    def __init__(self, rank: int, size: int, path: str | None = None) -> None:
        """Hang up a bell in new memory, or beside those in the memory another rank made at `path`."""
        if path is None:
            self._file = os.memfd_create("shardwise-bells", os.MFD_CLOEXEC)
            os.ftruncate(self._file, size * _SLOT_BYTES)
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        # Others open the memory through this process: there is no name that a killed job could leave behind.
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._memory = mmap.mmap(self._file, size * _SLOT_BYTES)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._asleep = memoryview(self._memory)[_FLAG::_SLOT_BYTES]
        self._rank, self._own = rank, self._base + rank * _SLOT_BYTES
        self._until = _Time()
        # Nobody rings before the flag is set.
        _make(self._own, 1, 0)

    def ring(self, rank: int) -> None:
        """Wake a rank, if it is on this node and asleep."""
        if self._asleep[rank]:
            self._asleep[rank] = 0
            _post(self._base + rank * _SLOT_BYTES)

    def lie_down(self) -> None:
        """Ask to be rung from now on; what is waited for must be tested once more before `sleep`."""
        self._asleep[self._rank] = 1

    def sleep(self, seconds: float) -> bool:
        """Sleep until rung, at most for the given time; tell whether it was a ring."""
        until = _clock() + seconds
        self._until.seconds = int(until)
        self._until.nanoseconds = int((until % 1.0) * 1e9)
        return _wait(self._own, self._until) == 0

    def get_up(self) -> None:
        """Ask not to be rung any more; a ring that came too late only shortens the next sleep."""
        self._asleep[self._rank] = 0

    def close(self) -> None:
        """Take the bell down; nobody can open the memory through this process any more."""
        self._asleep[self._rank] = 0
        os.close(self._file)
