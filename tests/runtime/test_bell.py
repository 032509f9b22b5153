"""A ring wakes a sleeper early; without one it sleeps its time; who is awake is left alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from shardwise.runtime import mpi
from shardwise.runtime.bell import Bell
from shardwise.runtime.progress_thread import ProgressThread, wanted


@pytest.fixture
def bells() -> Iterator[tuple[Bell, Bell]]:
    first = Bell(0, 3)
    pair = first, Bell(1, 3, first.path)
    yield pair
    for bell in pair:
        bell.close()


def slept(bell: Bell, seconds: float) -> float:
    start = time.monotonic()
    bell.sleep(seconds)
    return time.monotonic() - start


def test_a_ring_wakes_the_sleeper(bells: tuple[Bell, Bell]) -> None:
    bells[1].lie_down()
    timer = threading.Timer(0.05, bells[0].ring, args=[1])
    timer.start()
    assert slept(bells[1], 10.0) < 5.0
    timer.join()


def test_a_ring_between_lying_down_and_sleeping_is_not_lost(bells: tuple[Bell, Bell]) -> None:
    bells[1].lie_down()
    bells[0].ring(1)
    assert slept(bells[1], 10.0) < 5.0


def test_rings_do_not_pile_up(bells: tuple[Bell, Bell]) -> None:
    bells[1].lie_down()
    for _ in range(1000):
        bells[0].ring(1)
    bells[1].get_up()
    assert slept(bells[1], 10.0) < 5.0
    assert slept(bells[1], 0.05) > 0.04


def test_who_does_not_lie_down_is_not_rung(bells: tuple[Bell, Bell]) -> None:
    for rank in (0, 1, 2):
        bells[0].ring(rank)
    assert slept(bells[0], 0.02) > 0.01
    assert slept(bells[1], 0.02) > 0.01


def token_round(rounds: int) -> float:
    rank, size = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1)
    for _ in range(rounds):
        if rank == 0:
            dist.send(token + 1, 1)
            dist.recv(token, size - 1)
        else:
            dist.recv(token, rank - 1)
            dist.send(token + 1, (rank + 1) % size)
    return token.item()


def has_bell() -> bool:
    return mpi.poller().bell is not None


def test_a_token_goes_round_more_ranks_than_cores() -> None:
    from shardwise.runtime.poller import cores

    assert run_ranks(has_bell, 4) == [cores() < 4] * 4
    assert run_ranks(token_round, 4, args=(50,)) == [200.0, 197.0, 198.0, 199.0]


def test_the_progress_thread_is_wanted_only_with_cores_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_PROGRESS_THREAD", raising=False)
    assert wanted(cores=8, local_ranks=4, threads_per_rank=1)
    assert not wanted(cores=8, local_ranks=4, threads_per_rank=2)
    monkeypatch.setenv("SHARDWISE_PROGRESS_THREAD", "0")
    assert not wanted(cores=8, local_ranks=1, threads_per_rank=1)


def test_the_progress_thread_drives_until_stopped() -> None:
    calls: list[float] = []
    thread = ProgressThread(lambda: calls.append(time.monotonic()))
    end = time.monotonic() + 5
    while len(calls) < 5 and time.monotonic() < end:
        time.sleep(0.001)
    thread.stop()
    count = len(calls)
    time.sleep(0.01)
    assert len(calls) == count >= 5
