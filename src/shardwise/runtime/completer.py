"""Complete the futures of operations under way, from a thread that lives while there are any.

A future's waiters sleep in C++, where nobody drives MPI: DistributedDataParallel, for one, starts the
all-reduce of a bucket, goes on with the backward pass, and at its end waits for the futures of all buckets.
So a thread tests what was started. Whoever calls `progress()` between computations helps it.

The thread sleeps between its tests, because on a node without spare cores it takes its time from the very
computation the messages are to hide behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.runtime.errors import StalledError

if TYPE_CHECKING:
    from shardwise.runtime.poller import Request

_SHORT_SECONDS = 50e-6
_LONG_SECONDS = 2e-3
# After this long the wait is for a peer that computes, not for a message under way.
_PATIENT_AFTER_SECONDS = 20e-3


@dataclass(frozen=True)
class Outstanding:
    """Say what has been under way since when, and which ranks it needs."""

    describe: Callable[[], str]
    ranks: Sequence[int]
    since: float


@dataclass(frozen=True)
class Owed:
    """Hold an operation whose result somebody was promised."""

    request: Request
    settle: Callable[[], Any]  # called once it is complete; returns what the future is to hold
    future: Any
    deadline_seconds: float
    outstanding: Outstanding


class Completer:
    """Test requests until they are complete, then complete their futures."""

    def __init__(self) -> None:
        self._owed: list[Owed] = []
        self._testing = threading.Lock()
        self._arrived = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def add(self, owed: Owed) -> None:
        """Take over a request; nobody else may test it from now on."""
        with self._arrived:
            self._owed.append(owed)
            if self._thread is None:
                self._stopping = False
                self._thread = threading.Thread(target=self._run, name="shardwise-futures", daemon=True)
                self._thread.start()
            self._arrived.notify()

    def poll(self) -> None:
        """Test everything once, unless the other thread is just doing so."""
        if not self._owed or not self._testing.acquire(blocking=False):
            return
        try:
            done = [owed for owed in list(self._owed) if _advance(owed)]
            if done:
                with self._arrived:
                    self._owed = [owed for owed in self._owed if not any(owed is other for other in done)]
        finally:
            self._testing.release()

    def oldest(self) -> Outstanding | None:
        """Return what has been under way longest."""
        owed = self._owed
        return owed[0].outstanding if owed else None

    def stop(self) -> None:
        """End the thread; what is still owed stays owed."""
        with self._arrived:
            self._stopping = True
            thread, self._thread = self._thread, None
            self._arrived.notify()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._arrived:
                while not self._owed and not self._stopping:
                    self._arrived.wait()
                if self._stopping:
                    return
                began = self._owed[0].outstanding.since
            self.poll()
            waited = time.monotonic() - began
            time.sleep(_SHORT_SECONDS if waited < _PATIENT_AFTER_SECONDS else min(_LONG_SECONDS, waited / 20))


def _advance(owed: Owed) -> bool:
    """Let an operation advance and tell whether its future is settled."""
    # Whatever goes wrong here belongs to whoever waits for the future, not to this thread.
    try:
        if not owed.request.Test():
            waited = time.monotonic() - owed.outstanding.since
            if waited < owed.deadline_seconds:
                return False
            raise StalledError(f"{owed.outstanding.describe()}: not complete after {waited:.1f} s")
        result = owed.settle()
    except Exception as error:
        owed.future.set_exception(error)
    else:
        owed.future.set_result(result)
    return True
