from __future__ import annotations

import pytest
from program_clock import makespan, peaks

from shardwise.plan import Edge, Plan
from shardwise.plan.room import alive_of
from shardwise.program.actions import Act, Program
from shardwise.program.build import build


def chained(line: str, *, training: bool = True) -> Program:
    """Build a program whose stages each read what the stage before makes."""
    plan = Plan.parse(line)
    edges = [Edge(f"v{s}", s, s + 1) for s in range(len(plan.stages) - 1)]
    return build(plan, edges, training=training)


def shown(program: Program, rank: int) -> str:
    return str(program).splitlines()[rank].partition(": ")[2]


def test_the_orders_are_those_of_the_papers():
    assert shown(chained("stages=3 schedule=layer"), 1) == "F1.0↓ B1.0↓ REDUCE1 STEP"
    assert shown(chained("stages=2 schedule=gpipe micro_batches=2"), 0) == (
        "F0.0↓ F0.1↓ B0.0↓ B0.1↓ REDUCE0 STEP"
    )
    assert shown(chained("stages=3 schedule=1f1b micro_batches=4"), 1) == (
        "F1.0↓ F1.1↓ B1.0↓ F1.2↓ B1.1↓ F1.3↓ B1.2↓ B1.3↓ REDUCE1 STEP"
    )
    assert shown(chained("stages=3 schedule=zero-bubble micro_batches=4"), 2) == (
        "F2.0↓ B2.0↓ F2.1↓ B2.1↓ F2.2↓ B2.2↓ W2.0↓ F2.3↓ B2.3↓ W2.1↓ W2.2↓ W2.3↓ REDUCE2 STEP"
    )
    mast = chained("stages=3 schedule=gems-mast")
    assert shown(mast, 0) == "F0.0↓ B0.0↓ F2.1↑ B2.1↑ REDUCE2 REDUCE0 STEP"
    assert shown(mast, 2) == "F2.0↓ B2.0↓ REDUCE2 F0.1↑ B0.1↑ REDUCE0 STEP"


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 20])
def test_1f1b_keeps_few_micro_batches_alive(stages, micro_batches):
    program = chained(f"stages={stages} schedule=1f1b micro_batches={micro_batches}")
    for stage, peak in enumerate(peaks(program)):
        assert peak[stage] == min(stages - stage, micro_batches)


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (1, 1), (2, 1), (3, 5)])
@pytest.mark.parametrize("replication", [1, 2, 4])
def test_gems_takes_the_time_of_its_bound(stages, forward, backward, replication):
    program = chained(f"stages={stages} schedule=gems-master replication={replication}")
    rounds = 2 * replication
    saved = (rounds - 1) * (stages - 1) * min(forward, backward)
    assert makespan(program, forward, backward) == rounds * stages * (forward + backward) - saved


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_gems_keeps_one_round_alive(stages):
    for parts in (1, 3):
        program = chained(f"stages={stages} schedule=gems-master replication=3 micro_batches={parts}")
        assert all(peak.total() <= 2 * parts and max(peak.values()) == parts for peak in peaks(program))


def test_mast_and_master_with_one_round_each_way_are_the_same():
    assert chained("stages=4 schedule=gems-mast").actions == chained("stages=4 schedule=gems-master").actions


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
def test_two_directions_have_a_smaller_bubble_than_one(stages):
    for micro_batches in (2, 4, 2 * stages, 4 * stages):
        plain = makespan(chained(f"stages={stages} schedule=1f1b micro_batches={micro_batches}"))
        program = chained(f"stages={stages} schedule=bidirectional micro_batches={micro_batches}")
        both = makespan(program)
        assert plain == 3 * (micro_batches + stages - 1)
        assert both < plain
        if stages % 2 == 0 and micro_batches >= stages:
            # Work alone takes 3 M; at least a third of the bubble goes.
            assert both - 3 * micro_batches <= (plain - 3 * micro_batches) * 2 / 3
        for rank, peak in enumerate(peaks(program)):
            assert peak.total() <= stages + 1
            assert peak[rank] <= max(stages - rank, rank + 1) + (2 * rank + 1 == stages) * stages


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_zero_bubble_has_a_third_of_the_bubble_in_the_same_memory(stages):
    for micro_batches in (stages, stages + 1, 3 * stages):
        program = chained(f"stages={stages} schedule=zero-bubble micro_batches={micro_batches}")
        assert makespan(program, 1, 1, 1) == 3 * micro_batches + stages - 1
        for stage, peak in enumerate(peaks(program)):
            assert peak[stage] <= stages - stage
        assert all(max(peak.values()) <= stages for peak in peaks(program, Act.BACKWARD_WEIGHT))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_zero_bubble_is_faster_than_1f1b(stages):
    for micro_batches in (1, 2, 5, 16):
        plain = makespan(chained(f"stages={stages} schedule=1f1b micro_batches={micro_batches}"))
        split = makespan(
            chained(f"stages={stages} schedule=zero-bubble micro_batches={micro_batches}"), 1, 1, 1
        )
        assert split < plain


def test_ranks_of_a_group_share_one_list():
    program = chained("stages=2x2|1|1 schedule=1f1b micro_batches=4")
    assert len({id(program.actions[rank]) for rank in range(4)}) == 1
    assert len({id(actions) for actions in program.actions}) == 3


def test_inference_has_forwards_only():
    program = chained("stages=3 schedule=bidirectional micro_batches=4", training=False)
    assert shown(program, 0) == "F0.0↓ F2.1↑ F0.2↓ F2.3↑"
    assert {a.act for actions in program.actions for a in actions} == {Act.RECEIVE, Act.FORWARD, Act.SEND}


@pytest.mark.parametrize(
    ("line", "alive"),
    [
        ("stages=3 schedule=layer", (1, 1, 1)),
        ("stages=3 schedule=gpipe micro_batches=5", (5, 5, 5)),
        ("stages=3 schedule=1f1b micro_batches=2", (2, 2, 1)),
        ("stages=3 schedule=zero-bubble micro_batches=5", (3, 2, 1)),
        ("stages=4 schedule=gems-master replication=2 micro_batches=2", (2, 2, 2, 2)),
        ("stages=4 schedule=bidirectional micro_batches=5", (3, 3, 2, 1)),
    ],
)
def test_memory_is_estimated_for_as_many_micro_batches_as_a_schedule_keeps(line, alive):
    program = chained(line)
    assert alive_of(Plan.parse(line)) == alive
    last = len(alive) - 1
    for rank, peak in enumerate(peaks(program)):
        for stage in {rank, last - rank} if program.bidirectional else {rank}:
            assert peak[stage] <= alive[stage]
        if not program.bidirectional:
            assert peak[rank] == alive[rank]
