"""Asking about this very machine: shapes are profiled within a budget, kept, and flagged until they are."""

import dataclasses

import pytest
from oracle_cases import machine, small_graph

import shardwise as sw
from shardwise.machine import Node
from shardwise.oracle.moves import Move
from shardwise.oracle.profile import measured, moved
from shardwise.runtime.calibrate import demand
from shardwise.runtime.calibrate.chains import chains_of
from shardwise.runtime.calibrate.device import device_name


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A machine that is this one, with an empty cache, and a profiler that counts instead of measuring."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    asked = []

    def profile_kernels(profile, programs, *, seconds, ranks=None, crowd=0, transport="gloo"):
        chains, _ = chains_of(programs, profile, crowd > 0)
        missing = {
            k: what for chain in chains for k, what in chain.keys().items() if not profile.knows(k, crowd > 0)
        }
        if missing:
            asked.append((seconds, len(missing)))
        for key, what in missing.items():
            times = dict.fromkeys(("forward", "backward_input", "backward_weight"), 1e-3)
            spread, crowded = dict.fromkeys(times, 0.0), dict.fromkeys(times, 1.5) if crowd else {}
            add = moved if isinstance(what, Move) else measured
            profile.add(key, add(what, times, spread, crowded=crowded))
        return []

    monkeypatch.setattr(demand, "profile_kernels", profile_kernels)
    device = dataclasses.replace(machine().device, name=device_name())
    return machine(device=device), asked


def test_unseen_shapes_are_profiled_within_the_budget_and_kept(here):
    where, asked = here
    graph = small_graph()
    first = sw.predict(graph, "data=2", where, profile_seconds=3.0)
    assert [seconds for seconds, _ in asked] == [3.0]
    assert first.flags == ()
    # All shapes are known now: nothing is measured, and without a budget the answer is the same.
    again = sw.predict(graph, "data=2", where, profile_seconds=3.0)
    plain = sw.predict(graph, "data=2", where)
    assert len(asked) == 1
    assert again.step_seconds == plain.step_seconds == first.step_seconds


def test_without_a_budget_what_was_not_seen_is_flagged(here):
    where, asked = here
    graph = small_graph()
    sw.predict(graph, "data=1", where, profile_seconds=3.0)
    other = sw.predict(graph, "spatial=2x1", where)
    assert "interpolated" in other.flags
    assert len(asked) == 1
    assert sw.predict(graph, "spatial=2x1", where, profile_seconds=1.0).flags == ()


def test_a_search_profiles_the_shapes_of_the_plans_that_matter(here):
    where, asked = here
    graph = small_graph()
    ranking = sw.search(graph, where, 2, profile_seconds=4.0, keep=3)
    assert sum(seconds for seconds, _ in asked) <= 4.0
    assert all(entry.prediction.flags == () for entry in ranking)


def test_other_machines_are_not_measured(here):
    _, asked = here
    sw.predict(small_graph(), "data=2", machine(), profile_seconds=3.0)
    sw.search(small_graph(), "lassen", 1, profile_seconds=3.0, keep=1)
    assert asked == []


def test_ranks_without_a_core_each_pay_what_computations_take_more_there(here):
    where, asked = here
    device = dataclasses.replace(where.device, host=True, update_bytes_per_second=1e30)
    few = where.replace(device=device)
    graph = small_graph()
    roomy = sw.predict(graph, "data=2", few, profile_seconds=3.0)
    crowd = few.replace(node=Node(1, 1), nodes=1)
    tight = sw.predict(graph, "data=2", crowd, profile_seconds=3.0)
    # The same computations are measured again, for how they fare in a crowd.
    assert len(asked) == 2
    forward = [p.breakdown[0]["forward"] for p in (roomy, tight)]
    # Two ranks on one core take twice as long, and each takes half as much again of its time.
    assert forward[1] == pytest.approx(3 * forward[0])
