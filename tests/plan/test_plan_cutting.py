from __future__ import annotations

import dataclasses
import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hand_graphs import IMAGE, chain, graph, layer
from shardwise.graph import TensorSpec
from shardwise.plan import Plan, PlanError, choose_cuts, cut, cuts_from_counts, cuts_from_names, stage_layers
from shardwise.plan.cutting import earliest_cut


def parts_of(cuts, n):
    return list(itertools.pairwise((0, *cuts, n)))


def slowest(costs, cuts, widths, boundary):
    edge = [0.0, *boundary, 0.0]
    parts = zip(parts_of(cuts, len(costs)), widths, strict=True)
    return max(sum(costs[a:b]) / width + edge[a] + edge[b] for (a, b), width in parts)


def fits(memory, cuts, widths, alive, limit):
    parts = zip(parts_of(cuts, len(memory)), widths, alive, strict=True)
    return all(sum(memory[a:b]) * live / width <= limit * (1 + 1e-9) for (a, b), width, live in parts)


@st.composite
def problems(draw):
    n = draw(st.integers(1, 8))
    stages = draw(st.integers(1, n))
    number = st.sampled_from([0.0, 1.0, 2.0, 5.0]) | st.floats(0, 10)
    return {
        "costs": draw(st.lists(number, min_size=n, max_size=n)),
        "stages": stages,
        "widths": draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages)),
        "boundary": draw(st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=n - 1, max_size=n - 1)),
        "memory": draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)),
        "alive": draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages)),
        "memory_limit": draw(st.none() | st.floats(1, 30)),
    }


@settings(max_examples=250, deadline=None)
@given(problems())
def test_no_cut_is_better_than_the_one_found(p):
    n, limit = len(p["costs"]), p["memory_limit"]
    every = itertools.combinations(range(1, n), p["stages"] - 1)
    allowed = [c for c in every if limit is None or fits(p["memory"], c, p["widths"], p["alive"], limit)]
    costs, stages = p.pop("costs"), p.pop("stages")
    if not allowed:
        with pytest.raises(PlanError, match="stages"):
            cut(costs, stages, **p)
        return
    found = cut(costs, stages, **p)
    assert found in allowed
    best = min(slowest(costs, c, p["widths"], p["boundary"]) for c in allowed)
    assert slowest(costs, found, p["widths"], p["boundary"]) <= best * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("widths", [[1, 2, 2, 4], [1, 1, 1, 1]])
@pytest.mark.timeout(20)
def test_costs_below_which_no_number_lies_come_to_an_end(widths):
    assert cut([0.0, 5e-324, 0.0, 0.0], 4, widths=widths) == (1, 2, 3)
    assert len(cut([5e-324] * 6, 4, widths=widths)) == 3


def test_equal_layers_are_cut_evenly():
    assert cut([1.0] * 12, 4) == (3, 6, 9)
    assert cut([1.0] * 12, 3, widths=[1, 2, 1]) == (3, 9)


def test_a_deep_network_is_cut_in_time():
    draw = random.Random(1)
    costs = [draw.random() ** 3 for _ in range(3000)]
    begin = time.process_time()
    found = cut(costs, 48, memory=costs, memory_limit=sum(costs) / 40)
    assert time.process_time() - begin < 2.0
    assert len(found) == 47
    assert slowest(costs, found, [1] * 48, [0.0] * 2999) <= sum(costs) / 48 + max(costs)


def test_a_deep_network_is_cut_into_many_stages_in_time():
    draw = random.Random(2)
    costs, boundary = [draw.random() ** 3 for _ in range(3000)], [draw.random() / 4 for _ in range(2999)]
    for widths in ([1] * 1024, [4] * 256, [64, *[1] * 64]):
        begin = time.process_time()
        found = cut(costs, len(widths), widths=widths, boundary=boundary)
        assert time.process_time() - begin < 2.0
        assert len(found) == len(widths) - 1


def test_the_first_cut_is_not_before_the_earliest_one():
    net = chain(60, flops=10**9)
    for width, singles in ((2, 3), (4, 1), (8, 8), (3, 20)):
        stages = "|".join([str(width), *["1"] * singles])
        assert choose_cuts(net, Plan.parse(f"stages={stages}"))[0] >= earliest_cut(net, width, singles)


def test_weights_count_in_full_on_every_rank():
    activations, weights = [8.0, 8.0, 0.0, 0.0], [0.0, 0.0, 4.0, 4.0]
    assert cut([1, 1, 1, 1], 2, memory=activations, fixed_memory=weights, memory_limit=8, widths=[2, 2]) == (
        2,
    )


def test_what_cannot_fit_is_named():
    with pytest.raises(PlanError, match="layer number 1 alone needs 9"):
        cut([1, 1, 1], 2, memory=[1, 9, 1], memory_limit=5)
    with pytest.raises(PlanError, match="write stages=3"):
        cut([1, 1, 1], 2, memory=[4, 4, 4], memory_limit=5)
    with pytest.raises(PlanError, match="from 1 to 2"):
        cut([1, 1], 3)


def test_cuts_by_names_of_layers_and_modules():
    net = graph(
        [
            layer("a.conv", ["x"]),
            layer("a.act", ["a.conv"]),
            layer("b.conv", ["a.act"]),
            layer("c", ["b.conv"]),
        ]
    )
    assert cuts_from_names(net, ["a.act", "c"]) == (2, 4)
    assert cuts_from_names(net, ["b"]) == (3,)
    with pytest.raises(PlanError, match=r"b\.conv"):
        cuts_from_names(net, ["b.conf"])
    with pytest.raises(PlanError, match="does not come after"):
        cuts_from_names(net, ["c", "b"])
    with pytest.raises(PlanError, match="first stage needs a layer"):
        cuts_from_names(net, ["a.conv"])


def test_cuts_by_counts_of_layers():
    assert cuts_from_counts(10, [3, 3, 4]) == (3, 6)
    with pytest.raises(PlanError, match="sum to 10"):
        cuts_from_counts(10, [3, 3])
    plan = Plan.parse("stages=3 cuts=3,3,4")
    assert [len(part) for part in stage_layers(chain(10), choose_cuts(chain(10), plan))] == [3, 3, 4]


def test_names_that_are_numbers_are_told_from_counts_by_their_number():
    net = graph([layer("0", ["x"]), layer("1", ["0"]), layer("2", ["1"])])
    assert choose_cuts(net, Plan.parse("stages=2 cuts=2")) == (3,)
    assert choose_cuts(net, Plan.parse("stages=2 cuts=1,2")) == (2,)
    with pytest.raises(PlanError, match="2 names of first layers, or 3 counts"):
        choose_cuts(net, Plan.parse("stages=3 cuts=2"))


def with_a_nested_result(flops=(1000, 1000, 1000)):
    """A layer of two tensors, two layers that take it apart, and one that reads both."""
    before, nested, last = flops
    both = dataclasses.replace(layer("pool", ["a"], flops=nested), outputs=(IMAGE, IMAGE))
    parts = [layer("pool.0", ["pool"], flops=1), layer("pool.1", ["pool"], flops=1)]
    return graph(
        [layer("a", ["x"], flops=before), both, *parts, layer("b", ["pool.0", "pool.1"], flops=last)]
    )


@pytest.mark.parametrize("cuts", ["pool.0", "pool.1", "2,3", "3,2"])
def test_a_cut_through_a_nested_result_is_refused_by_name(cuts):
    with pytest.raises(PlanError, match=r"'pool' returns several.* cut before 'pool', or before 'b'"):
        choose_cuts(with_a_nested_result(), Plan.parse(f"stages=2 cuts={cuts}"))


def test_no_cut_goes_through_a_nested_result():
    net = with_a_nested_result()
    assert choose_cuts(net, Plan.parse("stages=2 cuts=pool")) == (2,)
    assert choose_cuts(net, Plan.parse("stages=2 cuts=4,1")) == (5,)
    assert choose_cuts(net, Plan.parse("stages=3")) == (2, 5)
    for flops in itertools.product((1, 10**9), repeat=3):
        assert set(choose_cuts(with_a_nested_result(flops), Plan.parse("stages=2"))) <= {2, 5}
    uneven = choose_cuts(net, Plan.parse("stages=2"), cost=lambda la: 9.0 if la.name == "pool.1" else 1.0)
    assert uneven in ((2,), (5,))
    with pytest.raises(PlanError, match="4 stages for 3 layers"):
        choose_cuts(net, Plan.parse("stages=4"))


def test_balanced_cuts_follow_time_and_width():
    net = chain(12, flops=10**9)
    assert [len(part) for part in stage_layers(net, choose_cuts(net, Plan.parse("stages=3")))] == [4, 4, 4]
    wide = stage_layers(net, choose_cuts(net, Plan.parse("stages=2x2|1|1")))
    assert [len(part) for part in wide] == [8, 2, 2]
    costs = choose_cuts(net, Plan.parse("stages=2"), cost=lambda la: 100.0 if la.name == "l0" else 1.0)
    assert costs == (2,)
    assert choose_cuts(net, Plan()) == ()


def test_a_cut_with_less_to_send_is_preferred():
    assert cut([1.0] * 5, 2, boundary=[9.0, 0.5, 0.1, 9.0]) == (3,)
    assert cut([1.0] * 5, 2, boundary=[9.0, 0.1, 0.5, 9.0]) == (2,)


def test_balanced_cuts_keep_within_memory():
    # Four layers of equal work, of which the first two have most of the values.
    large, small = TensorSpec((4, 64, 16, 16)), TensorSpec((4, 8, 16, 16))
    specs = (large, large, small, small)
    made = [
        layer(f"l{i}", [f"l{i - 1}" if i else "x"], [f"w{i}"], spec=spec, flops=10**12)
        for i, spec in enumerate(specs)
    ]
    net, plan = graph(made), Plan.parse("stages=2 schedule=gpipe micro_batches=2")
    weights = 3 * 256
    assert choose_cuts(net, plan) == (3,)
    assert choose_cuts(net, plan, memory_limit=2 * (large.nbytes + weights)) == (3,)
    assert choose_cuts(net, plan, memory_limit=2 * (large.nbytes + weights) - 1) == (2,)
    needed = large.nbytes + 2 * small.nbytes + 3 * weights
    assert choose_cuts(net, plan, memory_limit=needed) == (2,)
    with pytest.raises(PlanError, match="no cut into 2 stages keeps every rank within"):
        choose_cuts(net, plan, memory_limit=needed - 1)
    # The last stage holds one micro-batch at a time.
    assert choose_cuts(net, plan.replace(schedule="1f1b"), memory_limit=needed - 1) == (2,)
    # One of two micro-batches is alive, and a rank has a stage from each end.
    both = plan.replace(schedule="gems-mast", micro_batches=1)
    assert choose_cuts(net, both, memory_limit=needed + 3 * weights) == (2,)
    with pytest.raises(PlanError, match="no cut into 2 stages"):
        choose_cuts(net, both, memory_limit=needed + 3 * weights - 1)
    assert choose_cuts(net, Plan.parse("stages=2 cuts=l1"), memory_limit=1) == (2,)
