from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan import Plan, PlanError, Split, Way
from shardwise.plan.plan import HALOS, NORMS, SCHEDULES, TAILS

counts = st.integers(1, 64)
grids = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
splits = st.one_of(
    st.just(Split()),
    grids.map(lambda grid: Split(Way.SPATIAL, grid)),
    st.builds(
        lambda way, n: Split(way, (n,)),
        st.sampled_from([Way.FILTER, Way.CHANNEL, Way.PAIRS, Way.BATCH]),
        counts,
    ),
)
names = st.text(st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc")), min_size=1).filter(
    lambda name: "," not in name
)
plans = st.builds(
    Plan,
    data=counts,
    stages=st.one_of(
        st.lists(splits, min_size=1, max_size=6).map(tuple),
        st.builds(lambda split, n: (split,) * n, splits, st.integers(1, 6)),
    ),
    schedule=st.sampled_from(SCHEDULES),
    micro_batches=counts,
    halo=st.sampled_from(HALOS) | counts.map(str),
    tail=st.sampled_from(TAILS),
    batch_norm=st.sampled_from(NORMS),
    cuts=st.lists(names, max_size=4).map(tuple),
    replication=counts,
)


@given(plans)
def test_a_plan_parses_from_the_line_it_prints_as(plan):
    assert Plan.parse(str(plan)) == plan


@given(plans)
def test_a_plan_loads_from_the_file_it_was_saved_to(tmp_path_factory, plan):
    path = tmp_path_factory.getbasetemp() / "plan.toml"
    plan.save(path)
    assert Plan.load(path) == plan


def test_a_file_may_give_lists_and_numbers(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('data = 2\nstages = ["2x2", 1, "pairs:2"]\ncuts = ["a", "b"]\n')
    expected = Plan(2, (Split(Way.SPATIAL, (2, 2)), Split(), Split(Way.PAIRS, (2,))), cuts=("a", "b"))
    assert Plan.load(path) == expected


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        ("data=0", "data", "at least 1"),
        ("data=two", "data", "'two' found"),
        ("data=2 data=3", "data", "given twice"),
        ("data", "data", "field=value"),
        ("stage=2", "stage", "no such field"),
        ("stages=2x", "stages", "no grid"),
        ("stages=2x2x2x2", "stages", "one to three"),
        ("stages=rows:2", "stages", "no way to split"),
        ("stages=filter:2x2", "stages", "filter:4"),
        ("spatial=2 filter=2", "filter", "choose one"),
        ("stages=2|1 spatial=2", "spatial", "leave one of them out"),
        ("schedule=2f2b", "schedule", "1f1b"),
        ("halo=0", "halo", "number of layers"),
        ("cuts=a,,b", "cuts", "separated by commas"),
        ("checkpoint=full", "checkpoint", "does not exist yet"),
        ("precision=bf16", "precision", "does not exist yet|exists yet"),
        ("optimizer_sharding=2", "optimizer_sharding", "does not exist yet"),
        ("streaming=on", "streaming", "does not exist yet"),
        ("cuts='a", "plan", "close every quote"),
    ],
)
def test_a_wrong_line_is_refused_with_field_and_remedy(line, field, words):
    with pytest.raises(PlanError, match=words) as caught:
        Plan.parse(line)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "split", [((2,), Way.NONE), ((2, 2), Way.BATCH), ((), Way.SPATIAL), ((0,), Way.SPATIAL)]
)
def test_a_split_that_means_nothing_is_refused(split):
    with pytest.raises(PlanError, match="stages"):
        Split(split[1], split[0])


def test_one_part_is_no_split_however_it_is_written():
    assert Split(Way.SPATIAL, (1, 1)) == Split(Way.FILTER, (1,)) == Split()
