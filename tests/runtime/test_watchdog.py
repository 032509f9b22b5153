"""Which waits can still end: decided from what ranks say of themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.runtime.watchdog import Peer, State, depends_on, judge

TIMEOUT = 120.0


def busy(idle: float = 0.0, silent: float = 0.0) -> Peer:
    return Peer(State.BUSY, (), "convolution", idle, silent)


def waiting(*ranks: int, idle: float = 500.0) -> Peer:
    return Peer(State.WAITING, ranks, f"recv from {ranks}", idle, 0.0)


def test_a_computing_peer_is_only_reported_however_long_it_takes() -> None:
    found = judge(0, (1,), 10_000.0, {1: busy(idle=1.0)}, TIMEOUT)
    assert not found.fatal
    assert found.reason == "rank 1 is alive, busy with: convolution"


def test_a_peer_that_waits_for_a_computing_rank_is_healthy_too() -> None:
    assert not judge(0, (1,), 10_000.0, {1: waiting(2), 2: busy(idle=1.0)}, TIMEOUT).fatal


def test_a_peer_without_progress_ends_the_job_and_is_named() -> None:
    found = judge(0, (1,), 130.0, {1: waiting(2), 2: busy(idle=125.0)}, TIMEOUT)
    assert found.fatal
    assert "rank 2 made no progress for 125 s in: convolution" in found.reason


def test_ranks_that_wait_for_each_other_end_the_job() -> None:
    found = judge(0, (1,), 130.0, {1: waiting(2), 2: waiting(0)}, TIMEOUT)
    assert found.fatal
    assert "no rank it depends on can move" in found.reason


def test_a_silent_peer_ends_the_job_only_after_the_timeout() -> None:
    assert not judge(0, (1,), 100.0, {1: busy(silent=100.0, idle=100.0)}, TIMEOUT).fatal
    found = judge(0, (1,), 130.0, {1: busy(silent=125.0, idle=0.0)}, TIMEOUT)
    assert found.fatal
    assert "no sign of life" in found.reason


def test_a_peer_that_has_left_ends_the_wait_soon() -> None:
    left = Peer(State.LEFT, (), "leaving", 6.0, 0.0)
    assert judge(0, (1,), 7.0, {1: left}, TIMEOUT).fatal
    assert not judge(0, (1,), 1.0, {1: Peer(State.LEFT, (), "leaving", 0.5, 0.0)}, TIMEOUT).fatal


def test_a_peer_that_never_reported_ends_the_job_only_after_the_timeout() -> None:
    assert not judge(0, (1,), 100.0, {}, TIMEOUT).fatal
    found = judge(0, (1, 2), 130.0, {2: busy()}, TIMEOUT)
    assert found.fatal
    assert found.reason == "rank 1 never gave a sign of life"


peers = st.dictionaries(
    st.integers(1, 5),
    st.builds(
        Peer,
        st.sampled_from([State.BUSY, State.WAITING]),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.just("x"),
        st.floats(0, 1000),
        st.just(0.0),
    ),
)


@given(peers, st.lists(st.integers(1, 5), min_size=1, max_size=3), st.floats(0, 1000))
def test_a_wait_is_ended_exactly_when_no_rank_it_depends_on_makes_progress(
    peers: dict[int, Peer], waits_for: list[int], waited: float
) -> None:
    reach = depends_on(0, waits_for, peers)
    assert 0 not in reach
    assert len(set(reach)) == len(reach)
    progressing = any(rank in peers and peers[rank].idle_seconds < TIMEOUT for rank in reach)
    unknown = any(rank not in peers for rank in reach)
    found = judge(0, waits_for, waited, peers, TIMEOUT)
    assert found.fatal == (waited >= TIMEOUT and (unknown or not progressing))
