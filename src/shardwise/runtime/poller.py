"""One poller through which every wait for a message goes.

A wait first spins, because most messages are a few microseconds away. A longer one yields the core
between tests, and at last sleeps, so that whoever shares the core can compute what it is waiting for:

    0 ............ spin_seconds ............ yield_seconds ............ completion or deadline
       test, test       test, sched_yield          test, sleep (growing to max_sleep_seconds)

With more ranks than cores a wait never spins, it yields: to the ranks that wait too this costs microseconds,
less than waking a core that went idle. But the core that it keeps is not offered to ranks that queue for
another one. So after a few tenths of a millisecond, or when a yield took long because it gave the core to a
rank that computes, the wait sleeps, and its sender wakes it. Waking by the clock takes
the core from those that compute, so who will be rung for sure looks up less and less often.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from shardwise.runtime.bell import Bell
from shardwise.runtime.completer import Completer
from shardwise.runtime.errors import StalledError


class Request(Protocol):
    """Describe what is waited for: `Test` drives progress and tells whether it is complete."""

    def Test(self) -> bool:
        """Return whether the request is complete."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """Hold a request that nobody waits for any more, what it needs, and what is left to do after it."""

    request: Request
    keep: object
    finish: Callable[[], None] | None = None
    expected: bool = True  # False for one whose wait was given up: it may never be complete


class Watch(Protocol):
    """Be told of waits that last, and say when one cannot end any more."""

    def begin_wait(self, ranks: Sequence[int], what: object, polled: bool = True) -> None:
        """Note that this rank waits for the given ones; who does not poll for a verdict is ended by it."""

    def end_wait(self) -> None:
        """Note that the wait is over."""

    def beat(self) -> None:
        """Note progress."""

    def verdict(self) -> str | None:
        """Return why the current wait cannot end, or None."""


@dataclass(frozen=True)
class Backoff:
    """Hold how long a wait spins and yields before it sleeps, and how long it sleeps unless it is rung."""

    spin_seconds: float
    yield_seconds: float
    max_sleep_seconds: float
    max_rung_sleep_seconds: float


SPARE_CORES = Backoff(100e-6, yield_seconds=50e-3, max_sleep_seconds=200e-6, max_rung_sleep_seconds=200e-6)
OVERSUBSCRIBED = Backoff(0.0, yield_seconds=4e-4, max_sleep_seconds=500e-6, max_rung_sleep_seconds=8e-3)
# A yield among waiting ranks is back in microseconds; one this long gave the core to a rank that computes.
_CONTENDED_SECONDS = 1e-3

# Longer than any job: whoever waits so is ended by the heartbeat's verdict alone.
FOREVER = timedelta(days=365)
# How long the runtime waits where nobody watches over it.
UNWATCHED_SECONDS = 1800.0

# A wait that lasts this long is published, so that other ranks see who waits for whom.
_PUBLISH_SECONDS = 0.25
_TESTS_PER_CLOCK = 8
_ADOPTED_BEFORE_PRUNING = 16


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


class Poller:
    """Wait for requests without starving other ranks, within a deadline, under a watch."""

    def __init__(self, backoff: Backoff, drive: Callable[[], object] | None = None) -> None:
        self.backoff = backoff
        self.drive = drive
        self.watch: Watch | None = None
        self.bell: Bell | None = None
        # Whether small sums are better added up in shared memory: all ranks share one node's too few cores.
        self.tables = False
        self.completer = Completer()
        # Handles are dropped, and so requests adopted, by any thread; only who holds the lock tests them.
        self._newcomers: deque[Adopted] = deque()
        self._adopted: list[Adopted] = []
        self._testing = threading.Lock()

    def wait(
        self,
        request: Request,
        deadline_seconds: float | None,
        what: object,
        ranks: Sequence[int] = (),
        rung: bool = False,
    ) -> None:
        """Return when the request is complete, or raise `StalledError` that names `what`.

        Without a deadline the watch alone decides how long that may take. Whoever completes a request that
        is `rung` wakes this rank.
        """
        test = request.Test
        if not test():
            self._wait_longer(test, deadline_seconds, what, ranks, rung)

    def wait_all(
        self,
        requests: Sequence[Request],
        deadline_seconds: float | None,
        what: object,
        ranks: Sequence[int] = (),
        rung: bool = False,
    ) -> None:
        """Return when all requests are complete; `what` may be a callable that describes them."""
        pending = [request for request in requests if not request.Test()]
        if not pending:
            return

        def test() -> bool:
            pending[:] = [request for request in pending if not request.Test()]
            return not pending

        self._wait_longer(test, deadline_seconds, what, ranks, rung)

    def _wait_longer(
        self,
        test: Callable[[], bool],
        deadline_seconds: float | None,
        what: object,
        ranks: Sequence[int],
        rung: bool,
    ) -> None:
        if deadline_seconds is None:
            deadline_seconds = UNWATCHED_SECONDS if self.watch is None else math.inf
        clock = time.perf_counter
        start = clock()
        backoff = self.backoff
        spin_end = start + backoff.spin_seconds
        while clock() < spin_end:
            for _ in range(_TESTS_PER_CLOCK):
                if test():
                    return
        yield_end = min(start + backoff.yield_seconds, start + deadline_seconds)
        give_way = os.sched_yield
        now = clock()
        while now < yield_end:
            give_way()
            if test():
                return
            before, now = now, clock()
            if now - before > _CONTENDED_SECONDS:
                break
        self._sleep_until(test, start, deadline_seconds, what, ranks, rung)

    def _sleep_until(
        self,
        test: Callable[[], bool],
        start: float,
        deadline_seconds: float,
        what: object,
        ranks: Sequence[int],
        rung: bool = False,
    ) -> None:
        clock, watch, bell, backoff = time.perf_counter, None, self.bell, self.backoff
        first = pause = backoff.max_sleep_seconds / 8
        longest = backoff.max_rung_sleep_seconds if rung and bell is not None else backoff.max_sleep_seconds
        sleep = time.sleep if bell is None else bell.sleep
        try:
            while True:
                if bell is not None:
                    bell.lie_down()
                if test():
                    return
                waited = clock() - start
                if waited > deadline_seconds:
                    raise StalledError(f"{describe(what)}: not complete after {waited:.1f} s")
                if watch is None and self.watch is not None and waited > _PUBLISH_SECONDS:
                    watch = self.watch
                    watch.begin_wait(ranks, what)
                if watch is not None and (reason := watch.verdict()) is not None:
                    raise StalledError(f"{describe(what)}: gave up after {waited:.1f} s: {reason}")
                # Where one message has come others are near: large ones travel in many pieces.
                pause = first if sleep(pause) else min(pause * 1.5, longest)
        finally:
            if bell is not None:
                bell.get_up()
            if watch is not None:
                watch.end_wait()
            elif self.watch is not None:
                # Many waits too short to publish are progress as well.
                self.watch.beat()

    def ring(self, ranks: Sequence[int]) -> None:
        """Wake ranks of this node that messages were just sent to; does nothing where each has a core."""
        if self.bell is not None:
            for rank in ranks:
                self.bell.ring(rank)

    @property
    def adopted(self) -> int:
        """Return how many requests are kept until they are complete."""
        return len(self._newcomers) + len(self._adopted)

    def adopt(self, orphan: Adopted) -> None:
        """Keep a request that nobody will wait for, and its buffers, until it is complete."""
        self._newcomers.append(orphan)
        # The garbage collector runs in any thread, and this MPI may be for one alone.
        if self.adopted > _ADOPTED_BEFORE_PRUNING and threading.current_thread() is threading.main_thread():
            self.progress()

    def drain(self, deadline_seconds: float, what: object) -> None:
        """Wait for everything that was adopted and can still be complete."""
        start = time.perf_counter()

        def drained() -> bool:
            self._test_adopted()
            return not any(orphan.expected for orphan in (*self._newcomers, *self._adopted))

        if not drained():
            self._sleep_until(drained, start, deadline_seconds, what, ())

    def progress(self) -> None:
        """Let outstanding messages advance; to be called between computations."""
        if self.drive is not None:
            self.drive()
        self.completer.poll()
        if self._newcomers or self._adopted:
            self._test_adopted()

    def _test_adopted(self) -> None:
        # A handle may be dropped inside this very function: adopting must not wait for the lock.
        if not self._testing.acquire(blocking=False):
            return
        try:
            while self._newcomers:
                self._adopted.append(self._newcomers.popleft())
            done = [orphan for orphan in self._adopted if orphan.request.Test()]
            if done:
                finished = {id(orphan) for orphan in done}
                self._adopted = [orphan for orphan in self._adopted if id(orphan) not in finished]
        finally:
            self._testing.release()
        for orphan in done:
            if orphan.finish is not None:
                orphan.finish()


def describe(what: Any) -> str:
    """Return the text of a description, which may be a callable so that fast waits never format it."""
    return str(what() if callable(what) else what)
