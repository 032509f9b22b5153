"""ParaDL's closed forms against cases worked out by hand."""

import pytest

from shardwise.oracle import closed_form as form
from shardwise.oracle.limits import limits
from shardwise.oracle.records import Record

# Three layers: W = 90, A = (30+40) + (40+20) + (20+10) = 160, C1 = 0.6, U = 0.03.
LAYERS = (
    Record("conv1", 30, 40, 20, 3, 4, (10, 8), (3, 3), 0.1, 0.2, 0.01),
    Record("conv2", 40, 20, 30, 4, 6, (10, 8), (5, 5), 0.05, 0.15, 0.01),
    Record("fc", 20, 10, 40, 6, 10, (), (), 0.04, 0.06, 0.01),
)
# D = 100, B = 20, so five iterations; alpha = 2, beta = 0.5, delta = 4.
S = form.Setting(100, 20, 2.0, 0.5)


def test_serial():
    cost = form.serial(LAYERS, S)
    assert cost.compute == pytest.approx(100 * 0.6 + 5 * 0.03)
    assert cost.communication == 0
    assert cost.memory == 2 * 4 * (20 * 160 + 90)
    assert cost.iteration_seconds(S) == pytest.approx(12.03)


def test_data():
    cost = form.data(LAYERS, S, 4)
    assert cost.compute == pytest.approx(25 * 0.6 + 5 * 0.03)
    assert cost.communication == pytest.approx(2 * 5 * 3 * (2 + 90 / 4 * 4 * 0.5))
    assert cost.memory == 2 * 4 * (5 * 160 + 90)


def test_spatial():
    cost = form.spatial(LAYERS, S, (1, 2))
    reduce = 2 * 5 * 1 * (2 + 45 * 4 * 0.5)
    # Tiles side by side: K//2 columns of 10 rows; conv1 has 3 channels in, 4 out, conv2 4 in, 6 out.
    conv1 = 2 * 2 + 20 * (1 * 10 * 3 + 1 * 10 * 4) * 4 * 0.5
    conv2 = 2 * 2 + 20 * (2 * 10 * 4 + 2 * 10 * 6) * 4 * 0.5
    assert cost.compute == pytest.approx(50 * 0.6 + 5 * 0.03)
    assert cost.communication == pytest.approx(reduce + 2 * 5 * (conv1 + conv2))
    assert cost.memory == 2 * 4 * (20 * 160 / 2 + 90)


def test_a_grid_of_two_by_two_exchanges_with_both_neighbours():
    # One row of 8/2 columns below, one column of 10/2 rows beside.
    assert LAYERS[0].halo_x((2, 2)) == 1 * 4 * 3 + 1 * 5 * 3
    assert LAYERS[2].halo_x((2, 2)) == 0


def test_layer_without_pipelining():
    cost = form.layer((LAYERS[:1], LAYERS[1:]), S)
    assert cost.compute == pytest.approx(100 * 0.6 + 5 * 0.03)
    assert cost.communication == pytest.approx(5 * 2 * (2 + 20 * 40 * 4 * 0.5))
    assert cost.memory == 2 * 4 * max(20 * 70 + 20, 20 * 90 + 70)


def test_pipeline():
    cost = form.pipeline((LAYERS[:1], LAYERS[1:]), S, 4)
    # Groups: forward 0.1 and 0.09, backward 0.2 and 0.21, update 0.01 and 0.02.
    assert cost.compute == pytest.approx(100 * (2 + 4 - 1) / 4 * (0.1 + 0.21) + 5 * 0.02)
    assert cost.communication == pytest.approx(2 * 100 * (2 + 4 - 2) / 20 * (2 + 5 * 40 * 4 * 0.5))


@pytest.mark.parametrize("strategy", [form.filters, form.channels])
def test_filter_and_channel(strategy):
    cost = strategy(LAYERS, S, 2)
    assert cost.compute == pytest.approx(50 * 0.6 + 100 / (20 * 2) * 0.03)
    sums = (2 + 20 * 40 / 2 * 4 * 0.5) + (2 + 20 * 20 / 2 * 4 * 0.5)
    assert cost.communication == pytest.approx(3 * 5 * 1 * sums)
    assert cost.memory == 2 * 4 * (20 * 160 + 45)


def test_data_filter():
    s = form.Setting(100, 20, 2.0, 0.5, outer_alpha=3.0, outer_beta=0.25, contention=2.0)
    cost = form.data_filters(LAYERS, s, 5, 2)
    assert cost.compute == pytest.approx(10 * 0.6 + 100 / (20 * 2) * 0.03)
    inside = 3 * 5 * 1 * ((2 + 20 * 40 / 10 * 4 * 0.5) + (2 + 20 * 20 / 10 * 4 * 0.5))
    between = 2 * 5 * 4 * (3 + 90 / 10 * 4 * 0.25 * 2)
    assert cost.communication == pytest.approx(inside + between)
    assert cost.memory == 2 * 4 * (4 * 160 + 45)


def test_data_spatial_gathers_behind_the_tiled_layers():
    cost = form.data_spatial(LAYERS, S, 5, (1, 2), split_layers=1)
    assert cost.compute == pytest.approx(20 * (0.3 / 2 + 0.3) + 5 * 0.03)
    halo = 2 * (2 * 2 + 4 * (10 * 3 + 10 * 4) * 4 * 0.5)
    gather = 1 * (2 + 4 * 40 / 2 * 4 * 0.5)
    inside = 2 * 1 * (2 + 90 * 4 / 2 * 0.5)
    leaders = 2 * 4 * (2 + 90 * 4 / 5 * 0.5)
    assert cost.communication == pytest.approx(5 * (halo + gather + inside + leaders))
    assert cost.memory == pytest.approx(2 * 4 * (4 * (70 / 2 + 90) + 90))


def test_one_pe_is_serial_for_every_strategy():
    alone = form.serial(LAYERS, S)
    for cost in (
        form.data(LAYERS, S, 1),
        form.spatial(LAYERS, S, (1, 1)),
        form.layer((LAYERS,), S),
        form.pipeline((LAYERS,), S, 4),
        form.filters(LAYERS, S, 1),
        form.data_filters(LAYERS, S, 1, 1),
        form.data_spatial(LAYERS, S, 1, (1, 1)),
    ):
        assert (cost.compute, cost.communication) == (pytest.approx(alone.compute), 0)


def test_limits_name_the_layer_that_decides():
    table = {limit.strategy: limit for limit in limits(LAYERS, 32)}
    assert {name: limit.max_ranks for name, limit in table.items()} == {
        "data": 32,
        "spatial": 80,
        "pipeline": 3,
        "filter": 4,
        "channel": 4,
        "data+filter": 128,
        "data+spatial": 2560,
    }
    assert table["filter"].decided_by == "filters of conv1"
    assert table["channel"].decided_by == "channels of conv2"
    assert "collectives in every layer" in table["filter"].limits
    assert "uneven stages" in table["pipeline"].limits
    assert "gradient exchange" not in table["filter"].limits
