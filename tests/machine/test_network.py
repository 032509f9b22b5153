"""Times of messages and collectives."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.machine import Collective, Curve, Link, Machine, MachineError, Tier

LINK = Link(1e-6, 1e9)
TABLE = Link(1e-6, 1e9, ((8.0, 2e-6), (1000.0, 4e-6), (9000.0, 20e-6)))


def tier(**fields):
    return Tier("node", 0, fields.pop("point_to_point", LINK), **fields)


def test_a_link_without_a_table_is_latency_plus_bytes_over_bandwidth():
    assert LINK.seconds(500) == pytest.approx(1e-6 + 500 / 1e9)


def test_a_table_is_linear_between_its_points_and_goes_on_with_its_last_slope():
    assert TABLE.seconds(1) == 2e-6
    assert TABLE.seconds(1000) == pytest.approx(4e-6)
    assert TABLE.seconds(5000) == pytest.approx(12e-6)
    assert TABLE.seconds(17000) == pytest.approx(36e-6)


@given(st.floats(1, 1e12), st.floats(1, 1e12))
def test_larger_messages_never_take_less_time(a, b):
    small, large = sorted((a, b))
    for link in (LINK, TABLE):
        assert link.seconds(small) <= link.seconds(large) * (1 + 1e-12)


def test_a_curve_interpolates_over_the_logarithm_and_stays_constant_outside():
    curve = Curve(((1e6, 0.1), (1e8, 0.5)))
    assert curve.at(1e7) == pytest.approx(0.3)
    assert curve.at(1.0) == 0.1
    assert curve.at(1e20) == 0.5
    with pytest.raises(MachineError, match="must rise"):
        Curve(((2.0, 1.0), (1.0, 1.0)))


def test_flows_beyond_the_links_slow_the_bytes_but_not_the_start():
    shared = tier(links=2)
    assert shared.message_seconds(1000, flows=2) == pytest.approx(2e-6)
    assert shared.message_seconds(1000, flows=4) == pytest.approx(1e-6 + 2 * 1e-6)
    measured = tier(contention=Curve(((1.0, 1.0), (4.0, 1.5))))
    assert measured.message_seconds(1000, flows=4) == pytest.approx(1e-6 + 1.5e-6)


def test_derived_all_reduce_is_a_ring_for_large_tensors_and_a_tree_for_small_ones():
    ring = 2 * (8 - 1) * (1e-6 + 8e6 / 8 / 1e9)
    tree = 2 * 3 * (1e-6 + 8 / 1e9)
    assert tier().collective_seconds("all_reduce", 8, 8e6) == pytest.approx(ring)
    assert tier().collective_seconds("all_reduce", 8, 8) == pytest.approx(tree)
    assert tier().collective_seconds("all_reduce", 1, 8e6) == 0.0


def test_a_measured_collective_is_returned_as_measured_and_grows_with_ranks():
    measured = tier(collectives=(Collective("all_reduce", 2, TABLE),))
    assert measured.collective_seconds("all_reduce", 2, 5000) == pytest.approx(12e-6)
    # Two rounds instead of one; 3/4 of the tensor passes each rank instead of 1/2.
    assert measured.collective_seconds("all_reduce", 4, 5000) == pytest.approx(2 * 2e-6 + 1.5 * 10e-6)


def test_the_innermost_tier_that_joins_the_ranks_is_taken():
    machine = Machine.load("abci")
    assert machine.tier((0, 3)).name == "node"
    assert machine.tier((3, 4)).name == "rack"
    assert machine.tier((0, 135)).name == "rack"
    assert machine.tier((0, 136)).name == "machine"


def test_ranks_per_node_share_out_the_devices_and_widen_the_tiers():
    machine = Machine.load("frontera").with_ranks_per_node(8)
    assert machine.device.peak("float32") == pytest.approx(
        Machine.load("frontera").device.peak("float32") / 4
    )
    assert machine.device.threads == 7
    assert [t.span for t in machine.tiers] == [8, 0]


def test_a_transport_that_was_not_measured_is_refused():
    node = dataclasses.replace(tier(), transport="gloo")
    machine = Machine.load("abci").replace(tiers=(node,), transport="gloo")
    with pytest.raises(MachineError, match="none for transport 'nccl'"):
        machine.with_transport("nccl")
