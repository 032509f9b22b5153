"""The search: nothing is lost, bounds hold, and on few ranks the best is that of exhaustive simulation."""

import pytest
import torch
from oracle_cases import Fixed, machine
from torch import nn

from shardwise.graph import capture
from shardwise.machine import Machine
from shardwise.oracle import Oracle, Roofline, choose
from shardwise.oracle.search import search
from shardwise.oracle.search.coarse import Coarse
from shardwise.oracle.search.space import MICRO_BATCHES, SCHEDULES, candidates
from shardwise.plan import Plan, PlanError


@pytest.fixture(scope="module")
def graph():
    """Four convolutions with batch norm, for eight samples of 4x8x8."""
    layers = []
    for _ in range(2):
        layers += [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    return capture(nn.Sequential(*layers), torch.zeros(8, 4, 8, 8), check=False)


def exhaustive(graph, where, ranks, kernels):
    """Predict every plan and return the fastest time."""
    oracle = Oracle(graph, where, kernels)
    times = {}
    for c in candidates(ranks, 2):
        if c.data * c.parts > graph.batch:
            continue
        try:
            times[str(c.plan())] = oracle.quick(c.plan(), graph.batch)[0]
        except PlanError:
            continue
    return times


@pytest.mark.parametrize("kernels", [Fixed(), Fixed(1e-8, 1e-8, 1e-8)], ids=["slow", "fast"])
def test_the_best_is_that_of_exhaustive_simulation(graph, kernels):
    where = machine()
    times = exhaustive(graph, where, 3, kernels)
    ranking = search(graph, where, 3, kernels=kernels)
    assert ranking.best.step_seconds == pytest.approx(min(times.values()))
    assert times[str(ranking.best.plan)] == pytest.approx(min(times.values()))


@pytest.mark.full
def test_the_best_is_that_of_exhaustive_simulation_on_eight_ranks(graph):
    where, kernels = machine(), Fixed()
    times = exhaustive(graph, where, 8, kernels)
    assert search(graph, where, 8, kernels=kernels).best.step_seconds == pytest.approx(min(times.values()))


def test_every_plan_is_accounted_for(graph):
    ranking = search(graph, machine(), 4, kernels=Fixed(), exact=False)
    counts = ranking.counts
    assert counts.enumerated == sum(1 for _ in candidates(4, 2))
    assert counts.enumerated == counts.refused + counts.pruned + counts.simulated


def test_the_space_has_all_dimensions():
    found = list(candidates(8, 2))
    assert {c.schedule for c in found} == set(SCHEDULES)
    assert len(SCHEDULES) >= 5
    assert len(MICRO_BATCHES) >= 6
    assert {c.halo for c in found} == {"layer", "fused"}
    assert any(c.ranks < 8 for c in found)
    assert any(str(c.plan()).startswith("stages=2x2|1|1") for c in found)
    assert {str(c.split.way) for c in found} == {"none", "spatial", "filter", "channel"}


def test_no_coarse_simulation_beats_its_bounds(graph):
    coarse = Coarse(graph, machine(), Fixed())
    for c in candidates(6, 2):
        if c.data * c.parts <= graph.batch and c.stages <= 6 and max(c.split.grid) <= 4:
            seconds = coarse.evaluate(c).seconds * (1 + 1e-9)
            assert coarse.bound(c) <= seconds, str(c)
            assert coarse.closer_bound(c) <= seconds, str(c)


@pytest.mark.parametrize("text", ["data=1", "data=2", "spatial=2x1", "filter=2", "stages=2 schedule=layer"])
def test_coarse_and_exact_agree(graph, text):
    where = Machine.load("lassen")
    plan = Plan.parse(text)
    fits = [c for c in candidates(2, 2) if c.plan() == plan]
    coarse = Coarse(graph, where, Roofline(where.device)).evaluate(fits[0])
    exact = Oracle(graph, where).predict(plan)
    assert coarse.seconds == pytest.approx(exact.step_seconds, rel=0.1)


def test_memory_refuses_with_a_reason(graph):
    free = search(graph, machine(), 4, kernels=Fixed(), exact=False)
    limit = 0.9 * free.best.peak_bytes
    ranking = search(graph, machine(), 4, memory=limit, kernels=Fixed(), exact=False)
    assert all(entry.peak_bytes <= limit for entry in ranking)
    assert any("GB" in refused.reason for refused in ranking.refused)


def test_nothing_fits_is_said_when_the_best_is_asked_for(graph):
    ranking = search(graph, machine(), 2, memory=1.0, kernels=Fixed())
    assert len(ranking) == 0
    with pytest.raises(ValueError, match="no plan for 2 ranks"):
        _ = ranking.best


def test_the_front_falls_in_memory_as_it_rises_in_time(graph):
    front = search(graph, machine(), 4, kernels=Fixed(), exact=False).front
    times, sizes = [e.step_seconds for e in front], [e.peak_bytes for e in front]
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)


def test_objectives_change_the_order(graph):
    small = search(graph, machine(), 4, kernels=Fixed(), objective="memory", exact=False)
    cheap = search(graph, machine(), 4, kernels=Fixed(), objective="cost", exact=False)
    fast = search(graph, machine(), 4, kernels=Fixed(), exact=False)
    assert small.best.peak_bytes <= fast.best.peak_bytes
    assert cheap.best.cost <= fast.best.cost
    with pytest.raises(ValueError, match="objective"):
        search(graph, machine(), 4, objective="beauty")


def test_choose_uses_all_ranks_and_gives_reasons(graph):
    choice = choose(graph, machine(), 2, kernels=Fixed())
    assert choice.plan.ranks == 2
    assert choice.prediction.step_seconds > 0
    assert str(choice.plan) in choice.reasons[0]
    assert choice.reasons[-1] == choice.prediction.bottleneck


def test_what_must_not_be_used_is_refused_with_the_reason_given(graph):
    def no_replicas(plan):
        return "no replicas here" if plan.data > 1 else ""

    ranking = search(graph, machine(), 2, kernels=Fixed(), refuse=no_replicas)
    assert all(entry.plan.data == 1 for entry in ranking)
    assert any(refused.reason == "no replicas here" for refused in ranking.refused)


def test_a_ranking_prints_as_a_table(graph):
    text = str(search(graph, machine(), 2, kernels=Fixed()))
    assert "samples/s" in text
    assert "simulated" in text
