"""The poller completes, gives way, keeps deadlines and listens to its watch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from shardwise.runtime import StalledError
from shardwise.runtime.poller import OVERSUBSCRIBED, SPARE_CORES, Backoff, Poller, describe


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

    def begin_wait(self, ranks: Sequence[int], what: object) -> None:
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
    Poller(Backoff(1e-4, 1e-3, 5e-3)).wait(request, 10.0, "x")
    processor = time.process_time()
    Poller(Backoff(1e-4, 1e-3, 5e-3)).wait(After(0.3), 10.0, "x")
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


def test_adopted_requests_are_kept_until_complete() -> None:
    poller = Poller(SPARE_CORES)
    buffers = bytearray(8)
    poller.adopt(After(0.01), buffers)
    poller.progress()
    assert poller._adopted
    time.sleep(0.011)
    poller.progress()
    assert not poller._adopted
