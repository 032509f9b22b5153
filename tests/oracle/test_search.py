"""The search: nothing is lost, bounds hold, and on few ranks the best is that of exhaustive simulation."""

import dataclasses
import itertools
import time

import pytest
import torch
from oracle_cases import Fixed, machine
from torch import nn

from shardwise.graph import capture
from shardwise.machine import Node
from shardwise.oracle import choose
from shardwise.oracle.search import Counts, NoPlanError, search
from shardwise.oracle.search.ranking import Entry, Ranking, front_of
from shardwise.oracle.search.space import MICRO_BATCHES, SCHEDULES, candidates
from shardwise.plan import Plan
from shardwise.zoo import build


@pytest.fixture(scope="module")
def graph():
    """Four convolutions with batch norm, for eight samples of 4x8x8."""
    layers = []
    for _ in range(2):
        layers += [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    return capture(nn.Sequential(*layers), torch.zeros(8, 4, 8, 8), check=False)


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
    assert any(str(c.plan()).startswith("stages=1x2|1x2|1x2|1|1") for c in found)
    assert {str(c.split.way) for c in found} == {"none", "spatial", "filter", "channel", "pairs"}


def test_memory_refuses_with_a_reason(graph):
    free = search(graph, machine(), 4, kernels=Fixed(), exact=False)
    limit = 0.9 * free.best.peak_bytes
    ranking = search(graph, machine(), 4, memory=limit, kernels=Fixed(), exact=False)
    assert all(entry.peak_bytes <= limit for entry in ranking)
    assert any("GB" in refused.reason for refused in ranking.refused)


@pytest.mark.parametrize("exact", [True, False])
def test_where_nothing_fits_the_nearest_plan_is_named_with_what_it_needs(graph, exact):
    least = search(graph, machine(), 2, kernels=Fixed(), objective="memory", exact=exact).best
    with pytest.raises(NoPlanError, match="no plan for 2 ranks of simple") as caught:
        search(graph, machine(), 2, memory=0.5 * least.peak_bytes, kernels=Fixed(), exact=exact)
    text = str(caught.value)
    assert f"the nearest plan is {least.plan} " in text
    assert f"needs {least.peak_bytes / 1e9:.3g} GB of {least.peak_bytes / 2e9:.3g} GB" in text
    assert "fewest-ranks" in text


def test_more_ranks_than_the_machine_has_are_refused(graph):
    with pytest.raises(ValueError, match=r"4000 asked for, lassen has 3168 \(792 nodes of 4\)"):
        search(graph, "lassen", 4000)


@pytest.mark.parametrize("exact", [True, False])
def test_a_plan_that_leaves_ranks_idle_has_their_memory(graph, exact):
    device = dataclasses.replace(machine().device, host=True)
    asking = {"kernels": Fixed(), "exact": exact, "objective": "memory", "keep": 100}
    found = search(graph, machine(device=device, node=Node(1, 4), nodes=1), 2, **asking)
    need = {n: min(e.peak_bytes for e in found if e.ranks == n) for n in (1, 2)}
    # One rank with all of the host's memory has room, two with half of it each have none.
    small = dataclasses.replace(device, memory_bytes=1.01 * need[1])
    assert need[2] > small.memory_bytes / 2
    fits = search(graph, machine(device=small, node=Node(1, 4), nodes=1), 2, **asking)
    assert {entry.ranks for entry in fits} == {1}
    assert all(entry.peak_bytes <= small.memory_bytes for entry in fits)


def test_no_plan_of_the_front_beats_another_one(graph):
    front = search(graph, machine(), 4, kernels=Fixed(), exact=False, front=True).front
    assert [e.step_seconds for e in front] == sorted(e.step_seconds for e in front)
    for a, b in itertools.permutations(front, 2):
        assert a.step_seconds > b.step_seconds or a.peak_bytes > b.peak_bytes or a.ranks > b.ranks
    least = search(graph, machine(), 4, kernels=Fixed(), exact=False, objective="memory").best
    assert min(e.peak_bytes for e in front) == least.peak_bytes


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


def test_the_front_is_printed_where_time_and_memory_disagree():
    found = [Entry(Plan.parse(p), t, 4, b, 2, None) for p, t, b in (("data=2", 1, 3e9), ("filter=2", 2, 1e9))]
    slower = Entry(Plan.parse("channel=2"), 3, 4, 2e9, 2, None)
    ranking = Ranking((*found, slower), front_of([slower, *found]), (), Counts(3, 0, 0, 3))
    behind = str(ranking).partition("none beats these in time, memory and ranks:")[2]
    assert [line.split()[0] for line in behind.strip().splitlines()] == ["data=2", "filter=2"]
    assert "none beats these" not in str(Ranking((found[0],), (found[0],), (), Counts(1, 0, 0, 1)))


def test_a_deep_network_on_four_ranks_is_ranked_by_events_without_simulating_every_plan():
    graph = capture(build("resnet50"), torch.empty(8, 3, 64, 64), check=False)
    start = time.perf_counter()
    ranking = search(graph, "lassen", 4, keep=3)
    assert time.perf_counter() - start < 30
    assert len(ranking) == 3
    seconds = [entry.step_seconds for entry in ranking]
    assert seconds == sorted(seconds)
    assert seconds == [entry.prediction.step_seconds for entry in ranking]
