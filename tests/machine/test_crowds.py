"""Networks that were measured with several numbers of ranks on a node."""

import pytest

from shardwise.machine import Collective, Device, Link, Machine, Node, Tier


def crowded():
    device = Device("cpu", {"float32": 1e9}, 1e9, 1e9, host=True)
    tiers = tuple(
        Tier("node", 0, Link(latency, 1e9), transport=transport, crowd=crowd)
        for transport, crowd, latency in (("mpi4py", 2, 1.0), ("mpi4py", 4, 2.0), ("gloo", 2, 3.0))
    )
    return Machine("here", device, Node(2, 2), tiers, transport="mpi4py")


def test_the_figures_for_at_least_so_many_ranks_count():
    latencies = {
        n: crowded().with_crowd(n).tier((0, 1)).point_to_point.latency_seconds for n in (0, 2, 3, 4, 8)
    }
    assert latencies == {0: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 8: 2.0}


def test_another_transport_has_its_own_figures():
    other = crowded().with_crowd(4).with_transport("gloo")
    assert other.tier((0, 1)).point_to_point.latency_seconds == 3.0


@pytest.mark.parametrize(("measured", "share"), [(2, 1.0), (4, 0.5)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_shared_cores_when_a_sum_was_measured_worked_only_a_part_of_it(measured, share, ranks):
    link = Link(1.0, 1e9)
    tier = Tier("node", 0, link, collectives=(Collective("all_reduce", measured, link),), crowd=measured)
    whole = tier.collective_seconds("all_reduce", ranks, 1e6)
    assert crowded().sum_seconds(tier, ranks, 1e6) == share * whole


@pytest.mark.parametrize(("measured", "share"), [(0, 1.0), (2, 1.0), (4, 0.5), (8, 0.25)])
def test_ranks_that_shared_cores_when_an_exchange_was_measured_worked_only_a_part_of_it(measured, share):
    tier = Tier("node", 0, Link(1.0, 1e9), exchange=Link(1.5, 1e9), crowd=measured)
    assert crowded().exchange_seconds(tier, 1e9) == share * 2.5


def test_sums_of_which_two_are_under_way_have_a_price_of_their_own_where_one_was_measured():
    one, many = Link(1.0, 1e9), Link(0.6, 1e9)
    alone = (Collective("all_reduce", 2, one),)
    tier = Tier("node", 0, one, collectives=(*alone, Collective("all_reduces", 2, many)), crowd=2)
    assert crowded().sum_seconds(tier, 2, 1e9, many=True) == pytest.approx(1.6)
    assert crowded().sum_seconds(tier, 2, 1e9) == pytest.approx(2.0)
    assert crowded().sum_seconds(Tier("node", 0, one, collectives=alone), 2, 1e9, many=True) == 2.0


def test_sums_between_many_nodes_are_no_cheaper_for_the_number_of_ranks():
    tier = Tier("machine", 0, Link(1.0, 1e9))
    whole = tier.collective_seconds("all_reduce", 1024, 1e6)
    assert crowded().sum_seconds(tier, 1024, 1e6) == whole


def test_a_crowd_survives_the_file(tmp_path):
    crowded().save(tmp_path / "here.toml")
    assert Machine.load(tmp_path / "here.toml") == crowded()
