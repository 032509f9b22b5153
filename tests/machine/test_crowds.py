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


def test_sums_between_many_nodes_are_no_cheaper_for_the_number_of_ranks():
    tier = Tier("machine", 0, Link(1.0, 1e9))
    whole = tier.collective_seconds("all_reduce", 1024, 1e6)
    assert crowded().sum_seconds(tier, 1024, 1e6) == whole


def test_a_crowd_survives_the_file(tmp_path):
    crowded().save(tmp_path / "here.toml")
    assert Machine.load(tmp_path / "here.toml") == crowded()
