"""Measured kernel times: keys, files, scaling and what is left to the fallback."""

import dataclasses
from pathlib import Path

import pytest
from oracle_cases import Fixed, machine, stage

from shardwise.oracle import Direction, Estimate, Task
from shardwise.oracle.kernels import Roofline
from shardwise.oracle.lateness import by_length, lateness, typical_meetings
from shardwise.oracle.moves import joins, move_of
from shardwise.oracle.profile import (
    INTERPOLATED,
    Profile,
    cache_path,
    drift,
    key_of,
    level,
    measured,
    moved,
    renewed,
)
from shardwise.program import Regrid


def tasks(text, batch=None, **options):
    program = stage(text, batch, **options)
    return [Task.of(op, r) for op in program.ops if not isinstance(op, Regrid) for r in range(program.width)]


def filled(entries):
    profile = Profile("here", 1, Fixed())
    for task, seconds in entries:
        times = {d.value: seconds for d in Direction}
        profile.add(key_of(task), measured(task, times, {d.value: seconds / 10 for d in Direction}))
    return profile


def test_inner_tiles_share_a_key_and_border_tiles_do_not():
    conv = [key_of(t) for t in tasks("spatial=4x1") if t.layer.op == "conv"][4:]
    assert conv[1] == conv[2]
    assert len({conv[0], conv[1], conv[3]}) == 3


def test_a_shared_normalisation_is_another_kernel():
    shared = next(t for t in tasks("spatial=2x1") if t.layer.op == "batch_norm")
    assert key_of(shared) != key_of(dataclasses.replace(shared, shared=False))


def test_what_was_measured_is_answered_as_measured():
    task = tasks("data=1")[0]
    estimate = filled([(task, 0.5)]).seconds(task, Direction.FORWARD)
    assert (estimate.seconds, estimate.spread, estimate.flag) == (0.5, 0.05, "")


def test_other_shapes_scale_from_the_nearest_of_the_same_operator_and_say_so():
    # Norms that share nothing stay apart from the rectifications behind them.
    whole = next(t for t in tasks("data=1") if t.layer.op == "relu")
    half = next(t for t in tasks("spatial=2x1", batch_norm="local") if t.layer.op == "relu")
    estimate = filled([(whole, 0.5)]).seconds(half, Direction.FORWARD)
    ratio = half.nbytes(Direction.FORWARD) / whole.nbytes(Direction.FORWARD)
    assert estimate.seconds == pytest.approx(0.5 * ratio)
    assert estimate.flag == INTERPOLATED
    assert estimate.spread > 0.05 * ratio


def test_two_relatives_tell_which_part_of_the_time_does_not_shrink():
    """Half and twice the samples of one convolution, between others that are nearer in size."""
    convolutions = [next(t for t in tasks("data=1", batch=b) if t.layer.op == "conv") for b in (2, 4, 8)]
    few, middle, many = convolutions
    stranger = next(
        t for t in tasks("data=1", batch=4) if t.layer.op == "conv" and t.wants[1] != few.wants[1]
    )
    profile = filled([(few, 0.3), (many, 0.9), (stranger, 7.0)])
    estimate = profile.seconds(middle, Direction.FORWARD)
    assert estimate.seconds == pytest.approx(0.1 + 0.1 * 4)
    assert estimate.flag == INTERPOLATED


def test_operators_never_measured_are_left_to_the_fallback():
    relu = next(t for t in tasks("data=1") if t.layer.op == "relu")
    conv = next(t for t in tasks("data=1") if t.layer.op == "conv")
    profile = filled([(relu, 0.5)])
    assert profile.seconds(conv, Direction.FORWARD) == Fixed().seconds(conv, Direction.FORWARD)


def test_copies_are_answered_as_measured_or_scaled_by_their_bytes():
    program = stage("spatial=2x1")
    moves = [
        move_of(op, 0, back=back) for op in program.ops if isinstance(op, Regrid) for back in (False, True)
    ]
    profile = filled([])
    assert profile.moving(moves[0]) == Fixed().moving(moves[0])
    profile.add(moves[0].key, moved(moves[0], {"forward": 0.5}, {"forward": 0.05}))
    assert profile.moving(moves[0]) == Estimate(0.5, 0.05)
    other = next(m for m in moves if m.nbytes != moves[0].nbytes)
    scaled = profile.moving(other)
    assert scaled.seconds == pytest.approx(0.5 * other.nbytes / moves[0].nbytes)
    assert scaled.flag == INTERPOLATED


def test_a_residual_join_is_one_addition():
    ops = stage("data=1").ops
    assert sum(map(len, joins(ops, set()))) == sum(map(len, joins(ops, {ops[-1].makes.slot})))
    first = ops[0].makes.slot
    assert sum(map(len, joins(ops, {first}))) == sum(map(len, joins(ops, set()))) + 1


def test_a_profile_survives_its_file_and_belongs_to_one_device(tmp_path):
    task = tasks("data=1")[0]
    path = tmp_path / "deep" / "profile.json"
    filled([(task, 0.5)]).save(path)
    again = Profile.load(path, "here", 1, Fixed())
    assert again.seconds(task, Direction.FORWARD).seconds == 0.5
    assert Profile.load(path, "elsewhere", 1, Fixed()).entries == {}
    assert Profile.load(path, "here", 2, Fixed()).entries == {}


def test_the_cache_is_where_the_user_wants_it(monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", "/somewhere")
    assert cache_path("cpu", 1).parent == Path("/somewhere")
    assert cache_path("cpu", 1) != cache_path("cpu", 2)


def test_a_later_profile_renews_the_times_and_tells_how_the_machine_changed():
    (task, *_) = tasks("data=2")
    before, after = (Profile("here", 1, Fixed()) for _ in range(2))
    before.add("a", measured(task, {"forward": 1.0}, {"forward": 0.1}, {"forward": 8.0}, {"forward": 1.5}))
    after.add("a", measured(task, {"forward": 1.5}, {"forward": 0.2}))
    after.meetings = by_length([(10.0, 0.5)])
    both = renewed(before, after)
    assert (both.entries["a"].seconds, both.entries["a"].room) == ({"forward": 1.5}, {"forward": 8.0})
    assert (both.lateness(), both.entries["a"].alone) == (((10.0, 0.05),), {"forward": 1.5})
    assert drift(before, after) == pytest.approx(0.5)


def test_times_that_are_taken_again_change_how_computations_compare_not_how_fast_the_machine_is():
    (task, *_) = tasks("data=2")
    before, after = Profile("here", 1, Fixed()), Profile("here", 1, Fixed())
    for key, (first, second) in {"a": (1.0, 4.0), "b": (2.0, 2.0), "c": (5.0, None)}.items():
        before.add(key, measured(task, {"forward": first}, {"forward": 0.1}, {"forward": 8.0}))
        if second is not None:
            after.add(key, measured(task, {"forward": second}, {"forward": 0.1}))
    after.add("d", measured(task, {"forward": 6.0}, {"forward": 0.1}))
    level(before, after)
    assert {key: entry.seconds["forward"] for key, entry in before.entries.items()} == pytest.approx(
        {"a": 2.0, "b": 1.0, "c": 5.0, "d": 3.0}
    )
    assert before.entries["a"].room == {"forward": 8.0}


def test_what_ranks_wait_and_gain_together_survives_the_file(tmp_path):
    (task, *_) = tasks("data=2")
    profile = Profile("here", 1, Fixed(), meetings=by_length([(4.0, 1.0), (1e-3, 0.0)]))
    others = ({"forward": 1.5}, {"forward": 1.25})
    profile.add(key_of(task), measured(task, {"forward": 1.0}, {"forward": 0.1}, None, *others))
    profile.save(tmp_path / "kernels.json")
    found = Profile.load(tmp_path / "kernels.json", "here", 1, Fixed())
    estimate = found.seconds(task, Direction.FORWARD)
    assert found.lateness() == ((1e-3, 0.0), (4.0, 0.25))
    assert (estimate.alone, estimate.crowded) == (1.5, 1.25)
    assert found.knows(key_of(task), crowded=True)


def test_ranks_are_as_late_as_in_a_typical_round_whoever_of_them_waits():
    # Two ranks take turns at being the slower one; once something interrupts one of them for long.
    first = [by_length([(1.0, 0.2), (1e-3, 0.0)]), by_length([(1.0, 0.0)]), by_length([(1.0, 9.0)])]
    other = [by_length([(1.0, 0.0), (1e-3, 0.0)]), by_length([(1.0, 0.2)]), by_length([(1.0, 0.0)])]
    assert lateness(typical_meetings([first, other])) == ((1.0, pytest.approx(0.1)),)


def test_what_was_not_measured_in_a_crowd_is_not_known_there():
    (task, *_) = tasks("data=2")
    profile = filled([(task, 0.5)])
    assert profile.knows(key_of(task))
    assert not profile.knows(key_of(task), crowded=True)


def test_what_waits_for_the_memory_is_scaled_by_its_bytes():
    few, many = (next(t for t in tasks("data=1", batch=b) if t.layer.op == "conv") for b in (2, 8))
    profile = filled([(many, 0.8)])
    assert profile.seconds(few, Direction.FORWARD).seconds == pytest.approx(0.2)
    # A device that computes for nothing waits for its memory alone.
    device = dataclasses.replace(machine().device, peak_flops={"float32": 1e18}, memory_bandwidth=1e9)
    profile.fallback = Roofline(device)
    ratio = few.nbytes(Direction.FORWARD) / many.nbytes(Direction.FORWARD)
    assert 0.25 < ratio < 1
    assert profile.seconds(few, Direction.FORWARD).seconds == pytest.approx(0.8 * ratio)
