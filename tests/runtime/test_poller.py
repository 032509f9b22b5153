"""The poller completes, gives way, keeps deadlines and listens to its watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from shardwise.runtime import StalledError
from shardwise.runtime import poller as module
from shardwise.runtime.poller import OVERSUBSCRIBED, SPARE_CORES, Adopted, Backoff, Poller, describe


class After:
    """A request that is complete some time after it was made."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds
        self.tests = 0

    def Test(self) -> bool:
        self.tests += 1
        return time.perf_counter() >= self.end


class Recorder:
    """A watch that gives up after some looks."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.waits: list[tuple[tuple[int, ...], str]] = []
        self.ended = 0

    def begin_wait(self, ranks: Sequence[int], what: object, polled: bool = True) -> None:
        self.waits.append((tuple(ranks), describe(what)))

    def end_wait(self) -> None:
        self.ended += 1

    def beat(self) -> None:
        self.ended += 1

    def verdict(self) -> str | None:
        self.patience -= 1
        return "rank 1 is gone" if self.patience < 0 else None


@pytest.mark.parametrize("backoff", [SPARE_CORES, OVERSUBSCRIBED])
@pytest.mark.parametrize("seconds", [0.0, 20e-6, 1e-3, 0.1])
def test_a_wait_ends_when_its_request_does(backoff: Backoff, seconds: float) -> None:
    request = After(seconds)
    Poller(backoff).wait(request, 10.0, "x")
    assert time.perf_counter() >= request.end


def test_a_long_wait_hardly_tests() -> None:
    request = After(0.2)
    Poller(Backoff(1e-4, 1e-3, 5e-3, 5e-3)).wait(request, 10.0, "x")
    processor = time.process_time()
    Poller(Backoff(1e-4, 1e-3, 5e-3, 5e-3)).wait(After(0.3), 10.0, "x")
    assert time.process_time() - processor < 0.15


def test_all_requests_of_a_batch_are_waited_for() -> None:
    requests = [After(seconds) for seconds in (0.02, 0.0, 0.01)]
    Poller(SPARE_CORES).wait_all(requests, 10.0, "x")
    assert time.perf_counter() >= max(request.end for request in requests)


def test_a_deadline_raises_with_the_description() -> None:
    with pytest.raises(StalledError, match=r"recv of 3: not complete after 0\.1 s"):
        Poller(SPARE_CORES).wait(After(10), 0.1, lambda: "recv of 3")


def test_a_watch_is_told_of_long_waits_and_can_end_them() -> None:
    poller = Poller(OVERSUBSCRIBED)
    watch = poller.watch = Recorder(patience=3)
    with pytest.raises(StalledError, match="rank 1 is gone"):
        poller.wait(After(10), 10.0, "recv", ranks=(1,))
    assert watch.waits == [((1,), "recv")]
    assert watch.ended == 1
    poller.wait(After(0.001), 10.0, "quick", ranks=(1,))
    assert len(watch.waits) == 1


def test_without_a_deadline_the_watch_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNWATCHED_SECONDS", 0.1)
    poller = Poller(OVERSUBSCRIBED)
    with pytest.raises(StalledError, match=r"not complete after 0\.1 s"):
        poller.wait(After(10), None, "recv")
    poller.watch = Recorder(patience=10**6)
    poller.wait(After(0.4), None, "recv")
    poller.wait_all([After(0.4)], None, "recv")
    poller.watch = Recorder(patience=3)
    with pytest.raises(StalledError, match="rank 1 is gone"):
        poller.wait(After(10), None, "recv")


def test_adopted_requests_are_kept_until_complete() -> None:
    poller = Poller(SPARE_CORES)
    buffers = bytearray(8)
    finished: list[int] = []
    poller.adopt(Adopted(After(0.01), buffers, lambda: finished.append(len(buffers))))
    poller.progress()
    assert poller.adopted == 1
    assert not finished
    time.sleep(0.011)
    poller.progress()
    assert poller.adopted == 0
    assert finished == [8]


def test_draining_waits_for_what_can_be_complete_and_no_longer() -> None:
    poller = Poller(SPARE_CORES)
    late = After(0.05)
    poller.adopt(Adopted(late, None))
    poller.adopt(Adopted(After(3600), None, expected=False))
    poller.drain(10.0, "leaving")
    assert late.Test()
    assert poller.adopted == 1
    poller.adopt(Adopted(After(3600), None))
    with pytest.raises(StalledError, match="leaving"):
        poller.drain(0.05, "leaving")


def test_requests_are_adopted_by_any_thread_while_others_are_tested() -> None:
    poller = Poller(SPARE_CORES)
    finished: list[int] = []

    def drop() -> None:
        for number in range(500):
            poller.adopt(Adopted(After(1e-4), None, lambda number=number: finished.append(number)))

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        poller.progress()
    poller.drain(10.0, "leaving")
    assert sorted(finished) == sorted([*range(500)] * 4)


def test_a_handle_dropped_while_others_are_tested_is_kept() -> None:
    poller = Poller(SPARE_CORES)

    class Dropping(After):
        def Test(self) -> bool:
            poller.adopt(Adopted(After(0.0), None))
            return True

    poller.adopt(Adopted(Dropping(0.0), None))
    poller.progress()
    assert poller.adopted == 1
    poller.progress()
    assert poller.adopted == 0
