from __future__ import annotations

import pytest

from hand_graphs import chain, graph, layer
from shardwise.plan import Plan
from shardwise.plan.plan import SCHEDULES


def test_the_map_shows_every_group_of_ranks():
    text = Plan.parse("data=2 stages=2x2|1|1 schedule=gems-mast").explain()
    for row in (
        "replica 0 down │ 0 1 2 3   │ 4       │ 5",
        "replica 0 up   │ 5 4 3 2   │ 1       │ 0",
        "replica 1 down │ 6 7 8 9   │ 10      │ 11",
        "replica 1 up   │ 11 10 9 8 │ 7       │ 6",
        "12 ranks, 2 replicas of the network on 6 ranks each.",
        "stage 0: 4 ranks, the image in 2x2 tiles",
    ):
        assert row in text


def test_a_plan_of_one_rank_is_explained_in_few_words():
    assert Plan().explain().splitlines()[:3] == [
        "plan: data=1",
        "1 rank.",
        "The mini-batch passes through in one piece.",
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_explained(schedule):
    plan = Plan.parse(f"stages=3 schedule={schedule} micro_batches={1 if schedule == 'layer' else 2}")
    assert f"Schedule {schedule}: " in plan.explain()


def test_with_a_network_the_layers_of_every_stage_are_named():
    text = Plan.parse("stages=3").explain(chain(6))
    assert "stage 1: one rank; 2 layers, l2 ... l3; 33% of the estimated time" in text
    shared = graph([layer("a", ["x"], ["w"]), layer("b", ["a"], ["w"])])
    assert "w is shared by stages 0, 1" in Plan.parse("stages=2").explain(shared)


def test_many_replicas_are_abridged():
    text = Plan.parse("data=100 stages=4x4|1").explain()
    assert "0 1 2 ... 15" in text
    assert "replica 99" in text
    assert "replica 50" not in text
