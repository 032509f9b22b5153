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
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.runtime.errors import StalledError

if TYPE_CHECKING:
    from shardwise.runtime.poller import Request

_SHORT_SECONDS = 50e-6
_LONG_SECONDS = 1e-3
# After this long without a new operation the wait is for a peer that computes, not for a message under way.
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
        # MPI may still write to the buffers of what was given up: they are kept.
        self._given_up: list[Owed] = []
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
            done = [(owed, word) for owed in list(self._owed) if (word := self._advance(owed)) is not None]
            if done:
                finished = {id(owed) for owed, _ in done}
                with self._arrived:
                    self._owed = [owed for owed in self._owed if id(owed) not in finished]
        finally:
            self._testing.release()
        # A future's callbacks run inside this call, and may start operations of their own.
        for _, word in done:
            word()

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

    def _advance(self, owed: Owed) -> Callable[[], None] | None:
        """Let an operation advance; return what tells its future once there is something to tell."""
        # Whatever goes wrong here belongs to whoever waits for the future, not to this thread.
        try:
            if owed.request.Test():
                return partial(owed.future.set_result, owed.settle())
        except Exception as error:
            return partial(owed.future.set_exception, error)
        waited = time.monotonic() - owed.outstanding.since
        if waited < owed.deadline_seconds:
            return None
        self._given_up.append(owed)
        text = f"{owed.outstanding.describe()}: not complete after {waited:.1f} s"
        return partial(owed.future.set_exception, StalledError(text))

    def _run(self) -> None:
        while True:
            with self._arrived:
                while not self._owed and not self._stopping:
                    self._arrived.wait()
                if self._stopping:
                    return
                newest = self._owed[-1].outstanding.since
            self.poll()
            recent = time.monotonic() - newest < _PATIENT_AFTER_SECONDS
            time.sleep(_SHORT_SECONDS if recent else _LONG_SECONDS)
