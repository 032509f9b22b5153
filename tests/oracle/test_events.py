"""The event simulation: waiting, messages, collectives, shared cores, deadlocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.machine import Curve
from shardwise.oracle.events import DeadlockError, Event, Kind, Speed, simulate

# A tenth of any work.
LATE = Curve(((1.0, 0.1),))


def work(seconds, category="forward"):
    return Event(Kind.WORK, seconds, category)


def meet(key, peers, seconds):
    return Event(Kind.MEET, seconds, "halo", key=key, peers=peers)


def end(spans, rank):
    return max(span.end for span in spans if span.rank == rank)


def seconds(spans, rank, category):
    return sum(s.end - s.start for s in spans if s.rank == rank and s.category == category)


def test_ranks_that_meet_go_on_when_the_last_has_come():
    spans = simulate({0: [work(1.0), meet("a", (0, 1), 0.5)], 1: [work(3.0), meet("a", (0, 1), 0.5)]})
    assert end(spans, 0) == end(spans, 1) == 3.5
    assert seconds(spans, 0, "bubble") == 2.0
    assert seconds(spans, 1, "bubble") == 0.0


def test_neighbours_only_wait_for_their_own_peers():
    lists = {
        0: [work(1.0), meet("a", (1,), 0.0)],
        1: [work(1.0), meet("a", (0, 2), 0.0)],
        2: [work(5.0), meet("a", (1,), 0.0)],
    }
    spans = simulate(lists)
    assert [end(spans, rank) for rank in range(3)] == [1.0, 5.0, 5.0]


def test_a_message_arrives_after_its_flight_while_the_sender_works_on():
    send = Event(Kind.SEND, 0.5, "stage transfer", key="m", flight=2.0)
    receive = Event(Kind.RECEIVE, 0.25, "stage transfer", key="m")
    spans = simulate({0: [work(1.0), send, work(1.0)], 1: [receive, work(1.0)]})
    assert end(spans, 0) == 2.5
    assert end(spans, 1) == 1.5 + 2.0 + 0.25 + 1.0
    assert seconds(spans, 1, "bubble") == 1.5
    assert seconds(spans, 1, "stage transfer") == 2.0 + 0.25


def test_a_launched_collective_runs_behind_the_work_that_follows():
    def launch(rank):
        return [
            work(1.0 + rank),
            Event(Kind.LAUNCH, 0.0, "reduction", key="r", peers=(0, 1), flight=3.0),
            work(2.0, "backward"),
            Event(Kind.WAIT, 0.0, "reduction", key="r"),
        ]

    spans = simulate({0: launch(0), 1: launch(1)})
    # All have joined at 2 s: from then on who waits waits for the sum.
    assert seconds(spans, 0, "reduction") == 5.0 - 3.0
    assert seconds(spans, 1, "reduction") == 5.0 - 4.0
    assert seconds(spans, 0, "bubble") == seconds(spans, 1, "bubble") == 0.0


def test_who_waits_for_others_to_join_has_a_bubble():
    launch = Event(Kind.LAUNCH, 0.0, "reduction", key="r", peers=(0, 1), flight=1.0)
    wait = Event(Kind.WAIT, 0.0, "reduction", key="r")
    spans = simulate({0: [launch, wait], 1: [work(3.0), launch, wait]})
    assert (seconds(spans, 0, "bubble"), seconds(spans, 0, "reduction")) == (3.0, 1.0)
    assert (seconds(spans, 1, "bubble"), seconds(spans, 1, "reduction")) == (0.0, 1.0)


@pytest.mark.parametrize(("lines", "last"), [(("a", "a"), 4.0), (("a", "b"), 2.0), ((None, None), 2.0)])
def test_collectives_of_one_line_go_one_after_another(lines, last):
    def events(rank):
        started = [
            Event(Kind.LAUNCH, 0.0, "reduction", key=i, peers=(0, 1), flight=2.0, line=line, taken=2.0)
            for i, line in enumerate(lines)
        ]
        return [*started, *(Event(Kind.WAIT, 0.0, "reduction", key=i) for i in range(2))]

    spans = simulate({rank: events(rank) for rank in range(2)})
    assert end(spans, 0) == end(spans, 1) == last


def test_more_ranks_than_cores_share_them_evenly():
    spans = simulate({rank: [work(1.0)] for rank in range(4)}, cores=2)
    assert [end(spans, rank) for rank in range(4)] == [2.0] * 4


def test_a_waiting_rank_leaves_its_core_to_others():
    lists = {
        0: [work(4.0), Event(Kind.SEND, 0.0, "stage transfer", key="m")],
        1: [Event(Kind.RECEIVE, 0.0, "stage transfer", key="m"), work(1.0)],
    }
    spans = simulate(lists, cores=1)
    assert end(spans, 0) == pytest.approx(4.0)
    assert end(spans, 1) == pytest.approx(5.0)


def test_nodes_do_not_share_their_cores_with_each_other():
    spans = simulate({rank: [work(1.0)] for rank in range(4)}, cores=1, ranks_per_node=2)
    assert [end(spans, rank) for rank in range(4)] == [2.0] * 4


def test_a_wait_for_nothing_is_a_deadlock_with_a_name():
    receive = Event(Kind.RECEIVE, 0.0, "stage transfer", "activation of conv1", key="never")
    with pytest.raises(DeadlockError, match=r"ranks \[1\].*receive activation of conv1"):
        simulate({0: [work(1.0)], 1: [receive]})


@given(
    st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=5), st.integers(0, 6)
)
def test_no_second_of_work_is_lost_and_no_rank_is_faster_than_its_work(columns, cores):
    ranks = range(len(columns))
    lists = {
        r: [e for i, t in enumerate(columns[r]) for e in (work(t), meet(i, tuple(ranks), 0.1))] for r in ranks
    }
    spans = simulate(lists, cores=cores)
    alone = simulate(lists)
    for rank in ranks:
        total = sum(columns[rank]) + 0.3
        busy = seconds(spans, rank, "forward") + seconds(spans, rank, "halo")
        assert busy >= total - 1e-6
        assert end(spans, rank) >= end(alone, rank) - 1e-6
    if not cores or cores >= len(columns):
        steps = sum(max(column[i] for column in columns) + 0.1 for i in range(3))
        assert max(end(spans, rank) for rank in ranks) == pytest.approx(steps)


def test_a_rank_that_works_alone_may_be_faster():
    lists = {0: [work(2.0), meet("a", (0, 1), 0.0)], 1: [work(1.0), meet("a", (0, 1), 0.0)]}
    # One second with both at work, then the rest of rank 0 at twice the speed.
    spans = simulate(lists, cores=2, paces={0: Speed(2.0), 1: Speed(2.0)})
    assert end(spans, 0) == pytest.approx(1.5)
    assert end(simulate(lists, cores=2), 0) == pytest.approx(2.0)


def test_beside_one_that_needs_less_memory_half_of_the_slowdown_is_lost():
    lists = {0: [work(3.0)], 1: [work(9.0)]}
    spans = simulate(lists, cores=2, paces={0: Speed(2.0), 1: Speed(1.0)})
    # Rank 0 takes 1.5 s alone and 3 s beside one like itself; rank 1 is as fast as ever.
    assert end(spans, 0) == pytest.approx(2.25)
    assert end(spans, 1) == pytest.approx(9.0)
    # Four on two cores: each has one for half of the time, beside two like itself and one that needs nothing.
    lists = {rank: [work(1.0)] for rank in range(4)}
    spans = simulate(lists, cores=2, paces={0: Speed(), 1: Speed(2.0), 2: Speed(2.0), 3: Speed(2.0)})
    assert end(spans, 1) == pytest.approx(2.0 * (2.0 + 5 / 3) / 2 / 2.0)


def test_more_ranks_than_cores_take_more_of_their_time():
    lists = {0: [work(1.0)], 1: [work(1.0)], 2: [work(2.0)]}
    spans = simulate(lists, cores=2, paces=dict.fromkeys(lists, Speed(crowded=1.25)))
    # Three share two cores until two are done, and then the last one has a core of its own.
    assert end(spans, 0) == end(spans, 1) == pytest.approx(1.5 * 1.25)
    assert end(spans, 2) == pytest.approx(1.5 * 1.25 + 1.0)


def test_ranks_that_meet_are_late_by_a_part_of_what_they_did_since_they_met():
    meet = [Event(Kind.MEET, 0.5, "statistics", "norm", ("norm", i), (0, 1)) for i in range(2)]
    lists = {
        rank: [Event(Kind.WORK, 2.0, "forward"), meet[0], Event(Kind.WORK, 4.0, "forward"), meet[1]]
        for rank in range(2)
    }
    for cores in (0, 1):
        spans = simulate(lists, cores=cores, jitter=LATE)
        share = 2 if cores else 1
        late = [span.end - span.start for span in spans if span.rank == 0 and span.category == "bubble"]
        assert late == pytest.approx([0.2 * share, 0.4 * share])


def test_ranks_are_late_by_a_larger_part_of_less_work():
    def step(seconds, jitter):
        meeting = Event(Kind.MEET, 0.0, "statistics", "norm", "norm", (0, 1))
        return end(simulate({rank: [work(seconds), meeting] for rank in range(2)}, jitter=jitter), 0)

    curve = Curve(((1e-3, 0.5), (1e-1, 0.1)))
    assert step(1e-3, curve) == pytest.approx(1.5e-3)
    assert step(1e-2, curve) == pytest.approx(1.3e-2)
    # Beyond what was measured the part stays as it was.
    assert step(1e-4, curve) == pytest.approx(1.5e-4)
    assert step(1.0, curve) == pytest.approx(1.1)
    floor = Curve(((1e-4, 0.2),))
    assert step(1e-3, curve.at_least(floor)) == pytest.approx(1.5e-3)
    assert step(1.0, curve.at_least(floor)) == pytest.approx(1.2)


@pytest.mark.parametrize("cores", [0, 2])
def test_sums_begin_late_by_a_part_of_what_ranks_did_before_them(cores):
    launch = Event(Kind.LAUNCH, 0.0, "reduction", "gradients", "sum", (0, 1), 0.0, "line", 1.0)
    wait = Event(Kind.WAIT, 1.0, "reduction", "gradients", "sum")
    lists = {rank: [work(4.0), launch, work(2.0), wait] for rank in range(2)}
    # Complete 0.4 s behind the four seconds of both, which is over while they work on.
    assert end(simulate(lists, cores=cores, jitter=LATE), 0) == pytest.approx(7.0)
    lists = {rank: [work(4.0), launch, wait] for rank in range(2)}
    assert end(simulate(lists, cores=cores, jitter=LATE), 0) == pytest.approx(5.4)


def test_who_waited_for_a_message_is_late_only_by_a_part_of_what_it_did_since():
    meeting = Event(Kind.MEET, 0.5, "statistics", "norm", "norm", (0, 1))
    lists = {
        0: [Event(Kind.WORK, 8.0, "forward"), Event(Kind.SEND, 0.0, "stage transfer", key="m"), meeting],
        1: [Event(Kind.RECEIVE, 0.0, "stage transfer", key="m"), Event(Kind.WORK, 2.0, "forward"), meeting],
    }
    # Rank 1 worked two seconds since it was in step with rank 0, whatever rank 0 had done before.
    assert end(simulate(lists, jitter=LATE), 1) == pytest.approx(8.0 + 2.0 + 0.2 + 0.5)


def test_a_meeting_of_a_group_is_over_for_all_at_once_whoever_names_its_members():
    lists = {rank: [work(float(rank)), meet("a", tuple(range(4)), 0.0)] for rank in range(4)}
    assert {end(simulate(lists), rank) for rank in range(4)} == {3.0}


def hand_on():
    """A rank that hands something on after its work, and one that works with it then."""
    return {
        0: [work(2.0), Event(Kind.SEND, 0.0, "stage transfer", key="m")],
        1: [Event(Kind.RECEIVE, 0.0, "stage transfer", key="m"), work(1.0)],
    }


@pytest.mark.parametrize(
    ("cores", "waiting", "expected"), [(1, 0.0, 3.0), (1, 0.5, 3.5), (1, 9.0, 5.0), (2, 9.0, 3.0)]
)
def test_who_waits_looks_for_it_on_a_shared_core_before_it_sleeps(cores, waiting, expected):
    lists = hand_on() | {2: []}
    paces = dict.fromkeys(lists, Speed(waiting=waiting))
    assert end(simulate(lists, cores=cores, paces=paces), 1) == pytest.approx(expected)
