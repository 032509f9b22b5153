"""Prices of a lowered stage and the prediction of its step, against sums worked out by hand."""

import dataclasses

import pytest
import torch
from oracle_cases import Fixed, machine, small_graph, stage
from torch import nn

from shardwise.graph import capture
from shardwise.machine import Curve, Link, Node, Tier
from shardwise.oracle import Direction, Roofline, Task, predict, price_stage
from shardwise.plan import Split
from shardwise.program import Compute, Normalise, Regrid, lower_stage

OUT = 4 * 8 * 16 * 16  # elements of every value of the small network


def test_one_rank_adds_up_its_kernels():
    price = price_stage(stage("data=1"), machine(), Fixed())
    forward = sum(event.seconds for event in price.forward[0])
    backward = sum(event.seconds for event in price.backward[0])
    assert forward == pytest.approx(4 * OUT * 1e-6)
    # The first convolution needs no gradient of its input; batch norm has no separate weight pass.
    assert backward == pytest.approx(OUT * (3e-6 + 2e-6 + 2e-6 + 2e-6 + 3e-6))


def test_every_operation_is_priced_once_for_every_rank():
    program = stage("spatial=2x1")
    price = price_stage(program, machine(), Fixed())
    for rank in range(2):
        assert [op for op, _ in price.items(rank)] == list(program.ops)


def test_a_halo_costs_one_crossing_of_one_row_each_way():
    program = stage("spatial=2x1")
    price = price_stage(program, machine(), Fixed())
    regrids = [(op, seconds) for op, seconds in price.items(0) if isinstance(op, Regrid)]
    assert len(regrids) == 1
    row_bytes = 4 * 8 * 1 * 16 * 4
    assert regrids[0][1] == pytest.approx(2 * (1e-3 + row_bytes * 1e-6))


def test_shared_statistics_cost_a_small_reduction_in_both_directions():
    price = price_stage(stage("spatial=2x1"), machine(), Fixed())
    sums = [e for e in (*price.forward[0], *price.backward[0]) if e.category == "statistics"]
    # On two ranks a tree of one round there and one back; 3 sums forwards, 2 backwards, in float64.
    ring = [2 * 1 * (1e-3 + n * 8 * 8 / 2 * 1e-6) for n in (3, 2)]
    assert [e.seconds for e in sums] == pytest.approx(ring)
    assert all(e.peers == (0, 1) for e in sums)


def test_filter_split_halves_the_kernels_and_gathers_channels():
    whole = price_stage(stage("data=1"), machine(), Fixed())
    halves = price_stage(stage("filter=2"), machine(), Fixed())
    compute = {
        kind: sum(e.seconds for e in halves.forward[0] if e.category == kind) for kind in ("forward", "halo")
    }
    assert compute["forward"] < sum(e.seconds for e in whole.forward[0])
    gathered = OUT / 2 * 4
    assert compute["halo"] >= 1e-3 + gathered * 1e-6


def test_the_step_is_forward_backward_reduction_and_update():
    p = predict(small_graph(), "data=2", machine(), 8, kernels=Fixed())
    # The norm rectifies, shares its statistics with the other replica, and the loss is told to both.
    compute = OUT * 1e-6 * (4 + 12)
    parameters = (8 * 3 * 9 + 8 + 8 + 8 * 8 * 9 + 8) * 4
    update = parameters / 1e3

    def total(nbytes):
        return 2 * (1e-3 + nbytes / 2 * 1e-6)

    assert p.breakdown[0]["reduction"] == pytest.approx(total(parameters) + total(8))
    assert p.breakdown[0]["statistics"] == pytest.approx(total(3 * 8 * 8) + total(2 * 8 * 8))
    assert p.breakdown[0]["update"] == pytest.approx(update)
    assert p.breakdown[0]["forward"] + p.breakdown[0]["backward"] == pytest.approx(compute)
    assert p.step_seconds == pytest.approx(sum(p.breakdown[0].values()))
    assert p.samples_per_second == pytest.approx(8 / p.step_seconds)


def test_sums_of_gradients_go_one_after_another():
    """Two buckets that are complete at once take as long as both, however much of that is hidden."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    graph = capture(model, torch.zeros(2, 4, 16, 16), check=False)
    device = dataclasses.replace(machine().device, update_bytes_per_second=1e30)
    tier = Tier("node", 0, Link(0.0, 1e6), overlap=0.5)
    p = predict(graph, "data=2", machine(device=device, tiers=(tier,)), kernels=Fixed(0.0, 0.0, 0.0))
    each = 1024 * 1024 * 4 * 1e-6
    assert p.step_seconds == pytest.approx(2 * each, rel=1e-3)
    assert p.breakdown[0]["reduction"] == pytest.approx(2 * each, rel=1e-3)
    assert "doubling the bandwidth" in p.bottleneck
    assert p.bottleneck.startswith("Limited by gradient reduction")


@pytest.mark.parametrize("text", ["data=1", "spatial=2x1", "spatial=2x2", "filter=2", "channel=2", "batch=2"])
def test_the_breakdown_of_every_rank_adds_up_to_the_step(text):
    p = predict(small_graph(), text, machine(), kernels=Fixed())
    for rank in p.breakdown:
        assert sum(rank.values()) == pytest.approx(p.step_seconds)
    assert max(span.end for span in p.timeline) == pytest.approx(p.step_seconds)


def test_micro_batches_repeat_the_passes_but_not_the_update():
    once, thrice = (
        predict(
            small_graph(), f"spatial=2x1 schedule=gpipe micro_batches={n}", machine(), 4 * n, kernels=Fixed()
        )
        for n in (1, 3)
    )
    tail = once.breakdown[0]["reduction"] + once.breakdown[0]["update"]
    assert thrice.step_seconds == pytest.approx(3 * (once.step_seconds - tail) + tail)


def test_a_spread_of_the_kernels_becomes_an_interval():
    p = predict(small_graph(), "data=1", machine(), kernels=Fixed(spread=1e-3))
    low, high = p.interval
    # Nine kernels ran; two standard deviations of their sum on either side.
    assert high - p.step_seconds == pytest.approx(2 * (9 * 1e-6) ** 0.5)
    assert low < p.step_seconds < high


def test_assumed_fields_that_were_used_are_listed_and_sourced_ones_are_not():
    sources = {"tiers.node.point_to_point.latency_seconds": "a page", "device.memory_bytes": "a book"}
    p = predict(small_graph(), "spatial=2x1", machine(sources=sources))
    assert "tiers.node.point_to_point.bytes_per_second" in p.assumed
    assert "device.memory_bandwidth" in p.assumed
    assert not set(sources) & set(p.assumed)
    alone = predict(small_graph(), "data=1", machine(sources=sources))
    assert not any(name.startswith("tiers") for name in alone.assumed)


def test_the_bottleneck_names_what_would_help_most():
    slow_update = predict(small_graph(), "data=1", machine(), kernels=Fixed())
    assert slow_update.bottleneck.startswith("Limited by update: twice the speed of the optimizer saves")
    slow_kernels = predict(small_graph(), "data=1", machine(), kernels=Fixed(1.0, 1.0, 1.0))
    assert "twice the compute speed saves 50 %" in slow_kernels.bottleneck
    assert "samples/s" in str(slow_kernels)


def test_more_ranks_than_cores_take_proportionally_longer():
    device = machine().device
    host = type(device)("host", device.peak_flops, 1e9, 1e30, update_bytes_per_second=1e30, host=True)
    few = predict(small_graph(), "batch=4", machine(device=host), kernels=Fixed())
    crowded = machine(device=host, node=type(machine().node)(4, 2))
    many = predict(small_graph(), "batch=4", crowded, kernels=Fixed())
    busy = few.breakdown[0]["forward"] + few.breakdown[0]["backward"]
    assert many.step_seconds >= few.step_seconds + 0.99 * busy


def test_tasks_know_which_part_of_a_layer_they_compute():
    def fractions(text):
        ops = [op for op in stage(text).ops if isinstance(op, (Compute, Normalise))]
        second = [op for op in ops if op.layer.op == "conv"][1]
        return [Task.of(second, rank).fraction for rank in range(2)]

    assert fractions("spatial=2x1") == [0.5, 0.5]
    assert fractions("filter=2") == [0.5, 0.5]
    assert fractions("channel=2") == [0.5, 0.5]


def test_the_roofline_takes_the_slower_of_computing_and_moving():
    graph = small_graph()
    op = next(op for op in stage("data=1").ops if op.layer.op == "conv")
    task = Task.of(op, 0)
    slow_memory = machine().device.__class__("x", {"float32": 1e30}, 1e9, 1e6)
    moved = (4 * 3 * 16 * 16 + 8 * 3 * 9 + OUT) * 4
    assert Roofline(slow_memory).seconds(task, Direction.FORWARD).seconds == pytest.approx(moved / 1e6)
    assert task.flops(Direction.FORWARD) == graph.layers[1].forward_flops


def test_a_transposed_convolution_without_a_curve_computes_like_a_convolution_backwards():
    model = nn.ConvTranspose2d(8, 8, 3, padding=1, bias=False)
    graph = capture(model, torch.zeros(4, 8, 16, 16), check=False)
    curves = {
        "convolution/backward_input": Curve(((1.0, 0.5),)),
        "convolution/forward": Curve(((1.0, 0.25),)),
    }
    device = dataclasses.replace(machine().device, efficiency=curves)
    program = lower_stage(graph, graph.layers, Split(), departures=graph.output_names)
    task = Task.of(program.ops[-1], 0)
    for direction, part in ((Direction.FORWARD, 0.5), (Direction.BACKWARD_INPUT, 0.25)):
        seconds = Roofline(device).seconds(task, direction).seconds
        assert seconds == pytest.approx(task.flops(direction) / (1e9 * part))


def test_ranks_that_send_to_other_nodes_at_once_share_their_links():
    """Four tiles side by side, two on a node: of 2x2 both ranks of a node talk to the other one."""
    tiers = (Tier("node", 2, Link(0.0, 1e30)), Tier("machine", 0, Link(0.0, 1e6), links=1))
    two = machine(node=Node(2, 2), tiers=tiers)
    row = 4 * 8 * 16 * 4 * 1e-6

    def halo(text):
        price = price_stage(stage(text), two, Fixed())
        return max(sum(e.seconds for e in events if e.category == "halo") for events in price.forward)

    assert halo("spatial=4x1") == pytest.approx(row)
    # A row of half the width and its corner for each of two neighbours on the other node, at half the speed.
    assert halo("spatial=2x2") == pytest.approx(2 * (8 + 1) / 16 * row)


def test_only_ranks_that_read_samples_share_the_input():
    tier = Tier("node", 0, Link(0.0, 1e30))
    slow = machine(tiers=(tier,), input_bytes_per_second=1e3)
    nbytes = 4 * 3 * 16 * 16 * 4
    for text in ("data=1", "stages=2 schedule=layer", "data=4"):
        p = predict(small_graph(), text, slow, kernels=Fixed())
        assert p.breakdown[0]["input"] == pytest.approx(nbytes / 1e3), text
