from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan import Direction, Plan, PlanError, direction_of, micro_batches_of, samples_of

LINES = [
    "schedule=layer",
    "schedule=gpipe micro_batches=5",
    "schedule=1f1b micro_batches=3",
    "schedule=zero-bubble micro_batches=4",
    "schedule=gems-mast",
    "schedule=gems-mast micro_batches=3",
    "schedule=gems-master replication=3",
    "schedule=gems-master replication=2 micro_batches=2",
    "schedule=bidirectional micro_batches=6",
    "schedule=bidirectional micro_batches=3",
]
FLOWS = ["↓", "↓↓↓↓↓", "↓↓↓", "↓↓↓↓", "↓↑", "↓↓↓↑↑↑", "↓↑↓↑↓↑", "↓↓↑↑↓↓↑↑", "↓↑↓↑↓↑", "↓↑↓"]


@pytest.mark.parametrize(("line", "directions"), list(zip(LINES, FLOWS, strict=True)))
def test_micro_batches_flow_as_documented(line, directions):
    plan = Plan.parse(line)
    arrows = {Direction.DOWN: "↓", Direction.UP: "↑"}
    found = "".join(arrows[direction_of(plan, m)] for m in range(micro_batches_of(plan)))
    assert found == directions


@given(st.sampled_from(LINES), st.integers(0, 40), st.integers(1, 5))
def test_shares_cover_the_mini_batch_in_order_and_evenly(line, batch, data):
    plan = Plan.parse(line).replace(data=data)
    ranges = [samples_of(plan, batch, r, m) for r in range(data) for m in range(micro_batches_of(plan))]
    assert [s for a, b in ranges for s in range(a, b)] == list(range(batch))
    sizes = [b - a for a, b in ranges]
    assert max(sizes) - min(sizes) <= 2


def test_one_micro_batch_cannot_go_both_ways():
    with pytest.raises(PlanError, match="micro_batches=2 or more"):
        micro_batches_of(Plan.parse("schedule=bidirectional micro_batches=1"))


def test_the_layer_schedule_has_no_micro_batches():
    with pytest.raises(PlanError, match="schedule=gpipe"):
        micro_batches_of(Plan.parse("schedule=layer micro_batches=3"))
