from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand_graphs import chain, graph, layer
from shardwise.graph import Kind
from shardwise.machine import Machine, Node
from shardwise.plan import Plan, PlanError, check, nearest

NET = graph([layer(f"c{i}", [f"c{i - 1}" if i else "x"], [f"w{i}"], kind=Kind.CONVOLUTION) for i in range(6)])


def nearest_in(error: PlanError) -> Plan:
    """Read the plan that an error proposes."""
    assert error.remedy.startswith("nearest plan that works: ")
    return Plan.parse(error.remedy.removeprefix("nearest plan that works: "))


@pytest.mark.parametrize(
    ("line", "ranks", "proposed"),
    [
        ("data=2", 3, "data=3"),
        ("data=2 stages=2 spatial=2x2", 8, "stages=2 spatial=2x2"),
        ("data=2 stages=3", 8, "data=2 stages=4"),
        ("stages=2x2|1|1", 12, "data=2 stages=2x2|1|1"),
        ("stages=2x2|1|1", 8, "data=2 spatial=2x2"),
        ("stages=2x2|1|1", 7, "data=7"),
        ("data=2 stages=2 schedule=gems-mast", 6, "data=3 stages=2 schedule=gems-mast"),
    ],
)
def test_a_wrong_number_of_ranks_proposes_the_nearest_plan(line, ranks, proposed):
    with pytest.raises(PlanError, match=rf"there are {ranks}") as caught:
        check(Plan.parse(line), None, ranks)
    assert caught.value.field == "ranks"
    assert nearest_in(caught.value) == Plan.parse(proposed)


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("data=9", "data=8"),
        ("data=4 spatial=3", "data=2 spatial=3"),
        ("stages=16", "stages=8"),
        ("stages=8|4|1", "spatial=8"),
    ],
)
def test_a_plan_for_more_ranks_than_the_machine_has_proposes_one_that_fits(line, proposed):
    machine = replace(Machine.load("dgx-a100"), nodes=2, node=Node(4, 64))
    with pytest.raises(PlanError, match=r"dgx-a100 has 8 \(2 nodes of 4\)") as caught:
        check(Plan.parse(line), None, machine=machine)
    assert caught.value.field == "ranks"
    assert nearest_in(caught.value) == Plan.parse(proposed)
    check(Plan.parse(proposed), None, machine=machine)
    for roomy in (replace(machine, nodes=0), replace(machine, device=replace(machine.device, host=True))):
        check(Plan.parse(line), None, machine=roomy)


@given(
    st.sampled_from(["data=3", "stages=4", "stages=3 spatial=2", "stages=2x2|2|1", "data=2 filter=3"]),
    st.integers(1, 70),
)
def test_the_nearest_plan_always_uses_all_ranks(line, ranks):
    assert nearest(Plan.parse(line), ranks).ranks == ranks


@pytest.mark.parametrize(
    ("line", "field", "words", "proposed"),
    [
        ("stages=7", "stages", "7 stages for a network of 6 layers", "stages=6"),
        ("spatial=2x2x2", "stages", "2 spatial dimensions", "spatial=2x4"),
        ("stages=2x1x2|1", "stages", "grid of 3 dimensions", "stages=2x2|1"),
        ("pairs=9", "stages", "no layer of stage 0 has the 9 channels", "pairs=8"),
        ("stages=2 filter=9", "stages", "no layer of stage 0 has the 9 channels", "stages=2 filter=8"),
        ("schedule=1f1b replication=2", "replication", "gems-master", "data=1"),
    ],
)
def test_what_the_network_does_not_admit_proposes_a_plan_that_passes(line, field, words, proposed):
    with pytest.raises(PlanError, match=words) as caught:
        check(Plan.parse(line), NET)
    assert caught.value.field == field
    assert nearest_in(caught.value) == Plan.parse(proposed)
    assert check(nearest_in(caught.value), NET) is not None


@pytest.mark.parametrize("line", ["spatial=2", "stages=2|1", "stages=2 spatial=3"])
def test_a_grid_of_one_number_cuts_the_rows(line):
    plan = Plan.parse(line)
    check(plan, NET)
    assert plan.stages[0].fitted(2).grid == (plan.stages[0].width, 1)
    assert plan.stages[0].fitted(3).grid == (plan.stages[0].width, 1, 1)


def test_one_micro_batch_cannot_go_both_ways():
    with pytest.raises(PlanError, match="micro_batches=2 or more"):
        check(Plan.parse("stages=2 schedule=bidirectional"), NET)


def test_a_name_that_is_no_layer_is_refused():
    with pytest.raises(PlanError, match="no layer 'c9'"):
        check(Plan.parse("stages=2 cuts=c9"), NET)


@pytest.mark.parametrize(
    ("line", "batch", "words"),
    [
        ("data=4 micro_batches=2 schedule=gpipe", 5, "3 of them are empty"),
        ("data=4", 6, "no multiple of 4 shares"),
        ("batch=4", 2, "at most 2 samples for 4 ranks"),
        ("stages=3", 8, "fewer than the 3 stages"),
        ("schedule=gems-mast", 8, "nothing to overlap"),
    ],
)
def test_what_is_allowed_but_worth_knowing_is_noted(line, batch, words):
    notes = check(Plan.parse(line), NET, batch=batch)
    assert any(words in note for note in notes), notes


def test_a_plain_plan_has_no_notes():
    assert check(Plan.parse("data=2 stages=2 schedule=gpipe micro_batches=2"), chain(6), 4, 8) == []


def test_shared_weights_are_noted():
    net = graph([layer("a", ["x"], ["w"]), layer("b", ["a"], ["w"])])
    assert any("w: shared by stages 0, 1" in note for note in check(Plan.parse("stages=2"), net))


def test_an_empty_batch_is_refused():
    with pytest.raises(PlanError, match="at least 1"):
        check(Plan(), None, batch=0)
