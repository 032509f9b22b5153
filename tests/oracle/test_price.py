"""Prices of a lowered stage and the prediction of its step, against sums worked out by hand."""

import pytest
from oracle_cases import Fixed, machine, small_graph, stage

from shardwise.machine import Link, Tier
from shardwise.oracle import Direction, Roofline, Task, predict_stage_step, price_stage
from shardwise.oracle.step import BUCKET_BYTES, exposed
from shardwise.program import Compute, Normalise, Regrid

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
    program = stage("data=1")
    p = predict_stage_step(program, machine(), Fixed(), batch=8, replicas=2)
    compute = OUT * 1e-6 * (4 + 12)
    parameters = (8 * 3 * 9 + 8 + 8 + 8 * 8 * 9 + 8) * 4
    reduction = min(2 * (1e-3 + parameters / 2 * 1e-6), 2 * (1e-3 + parameters * 1e-6))
    update = parameters / 1e3
    assert p.breakdown[0]["reduction"] == pytest.approx(reduction)
    assert p.breakdown[0]["update"] == pytest.approx(update)
    assert p.breakdown[0]["forward"] + p.breakdown[0]["backward"] == pytest.approx(compute)
    assert p.step_seconds == pytest.approx(compute + reduction + update)
    assert p.samples_per_second == pytest.approx(8 / p.step_seconds)


def test_all_buckets_but_the_last_overlap_with_backward_as_far_as_was_measured():
    tier = Tier("node", 0, Link(0.0, 1.0), overlap=0.8)
    assert exposed(tier, 10.0, 4 * BUCKET_BYTES) == pytest.approx(10 * (0.25 + 0.75 * 0.2))
    assert exposed(tier, 10.0, BUCKET_BYTES / 2) == 10.0


@pytest.mark.parametrize("text", ["data=1", "spatial=2x1", "spatial=2x2", "filter=2", "channel=2", "batch=2"])
def test_the_breakdown_of_every_rank_adds_up_to_the_step(text):
    p = predict_stage_step(stage(text), machine(), Fixed(), batch=4)
    for rank in p.breakdown:
        assert sum(rank.values()) == pytest.approx(p.step_seconds)
    assert max(span.end for span in p.timeline) == pytest.approx(p.step_seconds)


def test_micro_batches_repeat_the_passes_but_not_the_update():
    once = predict_stage_step(stage("spatial=2x1"), machine(), Fixed(), batch=4)
    thrice = predict_stage_step(stage("spatial=2x1"), machine(), Fixed(), batch=12, micro_batches=3)
    tail = once.breakdown[0]["reduction"] + once.breakdown[0]["update"]
    assert thrice.step_seconds == pytest.approx(3 * (once.step_seconds - tail) + tail)


def test_a_spread_of_the_kernels_becomes_an_interval():
    p = predict_stage_step(stage("data=1"), machine(), Fixed(spread=1e-3), batch=4)
    low, high = p.interval
    # Nine kernels ran; two standard deviations of their sum on either side.
    assert high - p.step_seconds == pytest.approx(2 * (9 * 1e-6) ** 0.5)
    assert low < p.step_seconds < high


def test_assumed_fields_that_were_used_are_listed_and_sourced_ones_are_not():
    sources = {"tiers.node.point_to_point.latency_seconds": "a page", "device.memory_bytes": "a book"}
    p = predict_stage_step(stage("spatial=2x1"), machine(sources=sources), batch=4)
    assert "tiers.node.point_to_point.bytes_per_second" in p.assumed
    assert "device.memory_bandwidth" in p.assumed
    assert not set(sources) & set(p.assumed)
    alone = predict_stage_step(stage("data=1"), machine(sources=sources), batch=4)
    assert not any(name.startswith("tiers") for name in alone.assumed)


def test_the_bottleneck_names_what_would_help_most():
    slow_update = predict_stage_step(stage("data=1"), machine(), Fixed(), batch=4)
    assert slow_update.bottleneck.startswith("Limited by update: twice the speed of the optimizer saves")
    slow_kernels = predict_stage_step(stage("data=1"), machine(), Fixed(1.0, 1.0, 1.0), batch=4)
    assert "twice the compute speed saves 50 %" in slow_kernels.bottleneck
    assert "samples/s" in str(slow_kernels)


def test_more_ranks_than_cores_take_proportionally_longer():
    device = machine().device
    host = type(device)("host", device.peak_flops, 1e9, 1e30, update_bytes_per_second=1e30, host=True)
    few = predict_stage_step(stage("batch=4"), machine(device=host), Fixed(), batch=4)
    crowded = machine(device=host, node=type(machine().node)(4, 2))
    many = predict_stage_step(stage("batch=4"), crowded, Fixed(), batch=4)
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
