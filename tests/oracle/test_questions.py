"""Open plans are settled by prices; ranks, samples, pixels and scaling are found by searching."""

import dataclasses
import itertools

import pytest
import torch
from oracle_cases import Fixed, machine, small_graph
from torch import nn

import shardwise as sw
from shardwise.commands.subject import build_model, training_graph
from shardwise.graph import capture
from shardwise.machine import Link, Tier
from shardwise.oracle import Oracle
from shardwise.oracle.questions import (
    _most,
    fewest_ranks,
    largest_batch,
    largest_image,
    over_ranks,
    resized,
)
from shardwise.oracle.scaling import scaling
from shardwise.oracle.search import NoPlanError, search
from shardwise.oracle.search.room import Room
from shardwise.oracle.settle import layer_seconds, settle
from shardwise.oracle.strategies import STRATEGIES, family, strategy_of
from shardwise.plan import Plan, choose_cuts, stage_layers
from shardwise.program.choices import HALOS

SLOW, FAST = Tier("node", 0, Link(1.0, 1e12)), Tier("node", 0, Link(1e-9, 1e15))


def sized(memory_bytes, **fields):
    """A machine with so much memory per device, whose optimizer takes no time."""
    settings = {"memory_bytes": memory_bytes, "update_bytes_per_second": 1e12}
    return machine(device=dataclasses.replace(machine().device, **settings), **fields)


@pytest.fixture(scope="module")
def chain():
    """Six convolutions of very different cost, without anything between them."""
    widths = [4, 32, 32, 4, 4, 4, 4]
    layers = [nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths)]
    return capture(nn.Sequential(*layers), torch.zeros(4, 4, 32, 32), check=False)


@pytest.mark.parametrize(("tier", "halo"), [(SLOW, "fused"), (FAST, "layer")], ids=["slow", "fast"])
def test_halo_auto_becomes_what_costs_least(chain, tier, halo):
    """Latency asks for few exchanges; without it pixels made twice are a waste."""
    oracle = Oracle(chain, machine(tiers=(tier,)), Fixed())
    found = settle(oracle, "spatial=2x1 halo=auto tail=replicate")
    times = {h: oracle.quick(Plan.parse(f"spatial=2x1 tail=replicate halo={h}"), 4)[0] for h in HALOS}
    assert found.step_seconds == pytest.approx(min(times.values()), rel=0.01)
    assert times[halo] <= times["layer" if halo == "fused" else "fused"]


def test_stages_are_cut_where_the_priced_seconds_say(chain):
    """All layers take the same time here, so the even cut beats one by operations."""

    class Even(Fixed):
        def seconds(self, task, direction):
            estimate = super().seconds(task, direction)
            return dataclasses.replace(estimate, seconds=1.0 if task.layer.operands else 0.0)

    oracle = Oracle(chain, sized(1e9, tiers=(FAST,)), Even())
    assert len(set(layer_seconds(oracle, 4).values())) <= 2
    plain = oracle.quick(Plan.parse("stages=2 schedule=gpipe micro_batches=4"), 4)[0]
    found = settle(oracle, "stages=2 schedule=gpipe micro_batches=4")
    assert found.plan.cuts == (chain.layers[4].name,)
    assert found.step_seconds < plain
    assert str(found.plan.replace(cuts=())) in found.reasons[0]


# Milliseconds of ResNet-50 at 96 pixels, 4 samples, forwards and backwards on one core of a server.
MEASURED = {
    **dict.fromkeys(["conv1", "bn1", "maxpool"], 4.0),
    **dict.fromkeys(["layer1.0", "layer1.1", "layer1.2"], 22.3),
    "layer2.0": 37.3,
    **dict.fromkeys(["layer2.1", "layer2.2", "layer2.3"], 18.6),
    "layer3.0": 38.4,
    **dict.fromkeys(["layer3.1", "layer3.2", "layer3.3", "layer3.4", "layer3.5"], 23.6),
    **dict.fromkeys(["layer4.0", "layer4.1", "layer4.2"], 82.8),
    "fc": 4.7,
}


def test_stages_cut_without_a_machine_are_balanced_where_weights_outweigh_pixels():
    net = training_graph(build_model("resnet50"), (3, 96, 96), 4)

    def share(cuts):
        sums = [0.0] * 4
        for stage, layers in enumerate(stage_layers(net, cuts)):
            for la in layers:
                block = ".".join(la.name.split(".")[: 2 if la.name.startswith("layer") else 1])
                flops = sum(x.forward_flops + 1 for x in net if x.name.startswith(block))
                sums[stage] += MEASURED.get(block, 0.0) * (la.forward_flops + 1) / flops
        return max(sums) / sum(sums)

    plan = Plan.parse("stages=4")
    assert share(choose_cuts(net, plan, cost=lambda la: la.forward_flops + la.backward_flops)) > 0.45
    assert share(choose_cuts(net, plan)) < 0.38


def test_what_a_plan_says_itself_is_kept(chain):
    oracle = Oracle(chain, machine(tiers=(SLOW,)), Fixed())
    plan = f"stages=2 spatial=2x1 halo=layer tail=replicate cuts={chain.layers[2].name}"
    assert settle(oracle, plan).plan == Plan.parse(plan)


def test_the_fewest_ranks_fit_and_one_fewer_do_not():
    graph = small_graph()
    asking = {"kernels": Fixed(), "keep": 1, "objective": "memory"}
    where = sized(1.001 * search(graph, machine(), 2, **asking).best.peak_bytes)
    found = fewest_ranks(graph, where, most=4, **asking)
    assert found.value == 2
    assert len(found.ranking) == 1
    with pytest.raises(NoPlanError, match="fewest-ranks"):
        search(graph, where, 1, **asking)
    with pytest.raises(ValueError, match="up to 2 ranks"):
        fewest_ranks(graph, sized(1.0), kernels=Fixed(), most=2)


def test_the_largest_batch_and_image_grow_with_memory():
    graph = small_graph()
    asking = {"kernels": Fixed(), "keep": 1, "exact": False}
    few, many = (largest_batch(graph, sized(n), 2, most=4096, **asking).value for n in (6e4, 1e5))
    assert 1 <= few < many
    small, large = (largest_image(graph, sized(n), 2, 2, step=4, most=64, **asking).value for n in (3e4, 1e5))
    assert 4 <= small < large
    assert small % 4 == 0
    with pytest.raises(ValueError, match="not even one sample"):
        largest_batch(graph, sized(1.0), 2, **asking)


@pytest.mark.parametrize(("fixed", "each", "power"), [(0, 3, 2), (5e4, 0.7, 2), (2e5, 1, 3), (9e4, 400, 1)])
def test_the_largest_number_that_fits_is_guessed_from_bytes(fixed, each, power):
    asked = []

    def need(n):
        asked.append(n)
        return fixed + each * (-(-n // 4) * 4) ** power, 1e6

    found = _most(need, 7, 4096, power, "nothing fits")
    assert len(asked) <= 14
    assert need(found)[0] <= 1e6 < need(found + 1)[0]
    with pytest.raises(ValueError, match="nothing fits"):
        _most(lambda n: (2e6, 1e6), 7, 4096, power, "nothing fits")


def test_the_least_bytes_are_those_that_just_fit():
    graph = small_graph()
    least, hopeless = Room(graph, machine()).least(2, 4)
    assert hopeless == set()
    assert Room(graph, machine(), memory=1.0001 * least).fits(2, 4)
    assert not Room(graph, machine(), memory=0.9999 * least).fits(2, 4)
    below, _ = Room(graph, machine(), memory=1.0).least(2, 4)
    assert 1.0 < below <= least
    assert Room(graph, machine(), memory=1.0).least(2, 4)[1]


def test_images_keep_their_ratio_and_targets_follow():
    graph = capture(nn.Conv2d(3, 2, 3, padding=1), torch.zeros(1, 3, 8, 16), check=False)
    assert resized(graph, 32).shapes == ((1, 3, 32, 64),)


def test_several_numbers_of_ranks_are_ranked_together():
    graph, asking = small_graph(), {"kernels": Fixed(), "keep": 4}
    both = sw.search(graph, machine(), (1, 2), **asking)
    assert both.best.step_seconds == min(
        search(graph, machine(), n, **asking).best.step_seconds for n in (1, 2)
    )
    assert both.counts.enumerated == sum(
        search(graph, machine(), n, **asking).counts.enumerated for n in (1, 2)
    )
    with pytest.raises(ValueError, match="at least one"):
        over_ranks(graph, machine(), ())


def test_families_hold_the_plans_that_they_are_named_after():
    for name in STRATEGIES:
        found = list(family(name, 8, 2))
        assert found, name
        assert {strategy_of(c.plan()) for c in found} == {name}
        assert {c.ranks for c in found} == {8}


@pytest.mark.parametrize("weak", [False, True])
def test_scaling_curves_show_throughput_against_one_device(weak):
    graph = small_graph()
    found = scaling(graph, sized(1e9, tiers=(FAST,)), (1, 2, 4, 2048), 4, weak=weak, kernels=Fixed())
    data = {point.ranks: point for point in found.curve("data")}
    assert data[1].efficiency == pytest.approx(1.0)
    assert data[4].batch == (16 if weak else 4)
    assert data[4].samples_per_second > 2 * data[1].samples_per_second
    # 2048 replicas of four samples are too many, unless the mini-batch grows along.
    assert (2048 in data) is weak
    assert all(p.efficiency <= 1.001 for p in found.points)
    refused = [p for p in found.points if not p.plan]
    assert all(p.reason for p in refused)
    assert "data+spatial" in str(found)
