"""Heartbeats in one process: what ranks publish is enough to judge each other's waits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore

from shardwise.runtime import heartbeat as module
from shardwise.runtime.completer import Outstanding
from shardwise.runtime.heartbeat import Heartbeat
from shardwise.runtime.processor import Helpers

TIMEOUT = 0.8


@pytest.fixture
def pair() -> Iterator[tuple[Heartbeat, Heartbeat]]:
    store = HashStore()
    made = Heartbeat(0, 2, TIMEOUT, store), Heartbeat(1, 2, TIMEOUT, store)
    yield made
    for heartbeat in made:
        heartbeat.stop()


def within(seconds: float, check: Callable[[], bool], each: Callable[[], object] = lambda: None) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return True
        each()
        time.sleep(0.02)
    return False


def test_a_wait_for_a_rank_that_acts_is_never_given_up(pair: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = pair
    first.begin_wait((1,), "recv")
    assert not within(3 * TIMEOUT, lambda: first.verdict() is not None, each=lambda: second.beat("layer 3"))


def test_two_ranks_that_wait_for_each_other_are_told(pair: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = pair
    first.begin_wait((1,), "recv from 1")
    second.begin_wait((0,), "recv from 0")
    assert within(10, lambda: first.verdict() is not None)
    assert "recv from 0" in str(first.verdict())


def test_a_rank_that_left_is_named(pair: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = pair
    second.leave()
    first.begin_wait((1,), "recv")
    assert within(10, lambda: first.verdict() is not None)
    assert first.verdict() == "rank 1 has already left the job"


def test_ranks_that_leave_do_not_blame_those_who_left_before(pair: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = pair
    second.leave()
    first.leave()
    first.begin_wait((1,), "leaving")
    assert not within(3 * TIMEOUT, lambda: first.verdict() is not None)


def test_the_end_of_a_wait_clears_its_verdict(pair: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = pair
    second.leave()
    first.begin_wait((1,), "recv")
    assert within(10, lambda: first.verdict() is not None)
    first.end_wait()
    first.begin_wait((1,), "again")
    assert first.verdict() is None


class Frozen:
    """A store that takes records and answers no question until it is thawed."""

    def __init__(self) -> None:
        self.thawed = threading.Event()

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool:
        self.thawed.wait()
        return False

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return []


def test_a_store_that_does_not_answer_is_a_verdict_of_its_own(pair: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = pair
    frozen = Frozen()
    first._store, first.keeper = frozen, "rank 0"  # type: ignore[assignment]
    start = time.monotonic()
    first.begin_wait((1,), "recv")
    assert within(10, lambda: first.verdict() is not None, each=second.beat)
    assert time.monotonic() - start >= TIMEOUT
    assert first.verdict() == "rank 0, which keeps the heartbeats, gave no answer for 1 s"
    frozen.thawed.set()


def test_a_store_that_answers_late_is_forgiven(pair: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = pair
    frozen, kept = Frozen(), first._store
    first._store = frozen  # type: ignore[assignment]
    first.begin_wait((1,), "recv")
    assert not within(0.5 * TIMEOUT, lambda: first.verdict() is not None, each=second.beat)
    first._store = kept
    frozen.thawed.set()
    assert not within(2 * TIMEOUT, lambda: first.verdict() is not None, each=second.beat)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the codes with which the job would have been ended."""
    codes: list[int] = []
    monkeypatch.setattr(module, "end_job", codes.append)
    return codes


def test_sleep_with_futures_outstanding_is_a_wait_and_computing_is_not(
    pair: tuple[Heartbeat, Heartbeat], ended: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = pair
    bucket = Outstanding(lambda: "all_reduce of a bucket", (1,), time.monotonic())
    first.outstanding = lambda: bucket
    first._notice_sleep(used=0.9)
    assert first._current() is None
    assert within(10, lambda: bool(ended))
    assert ended == [1]
    assert "all_reduce of a bucket: gave up" in capsys.readouterr().err


def test_a_wait_inside_the_transport_names_its_action_too(
    pair: tuple[Heartbeat, Heartbeat], ended: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = pair
    second.beat("backward of stage 1")
    first.beat(lambda: "forward of stage 0")
    with first.waiting((1,), "halo of conv"):
        assert within(10, lambda: bool(ended))
    text = capsys.readouterr().err
    assert "halo of conv during forward of stage 0: gave up after" in text
    assert "rank 1 made no progress" in text
    assert "in: backward of stage 1" in text


def test_processes_that_work_for_a_rank_count_as_its_work() -> None:
    helpers = Helpers()
    assert helpers.share() == 0.0
    loader = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert within(10, lambda: helpers.share() > 0.05)
    finally:
        loader.kill()
        loader.wait()
    # What it used is now counted as that of a child which ended; nothing more is added.
    # Ranks that other tests left waiting are helpers too, and wake now and then.
    assert within(10, lambda: helpers.share() == 0.0)
