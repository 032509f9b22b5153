"""Networks that were measured with several numbers of ranks on a node."""

import dataclasses

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


def test_large_sums_that_were_timed_with_computations_count_for_as_many_ranks_over_the_same_transport():
    slow = Collective("all_reduces", 2, Link(0.0, 1.0, ((8.0, 1.0), (2e6, 5.0), (2e7, 9.0))))
    before = crowded()
    first, *others = before.tiers
    before = before.replace(tiers=(dataclasses.replace(first, collectives=(slow,)), *others))
    after = before.summing({("mpi4py", 2): ((2e6, 2.0), (2e7, 4.0)), ("mpi4py", 8): ((2e6, 7.0),)})

    def seconds(machine, nbytes, crowd=2):
        tier = machine.with_crowd(crowd).tier((0, 1))
        return tier.collective_seconds("all_reduces", 2, nbytes)

    # Smaller ones are as they were, and so is what other ranks and transports need.
    assert [seconds(after, n) for n in (8.0, 2e6, 2e7)] == [1.0, 2.0, 4.0]
    assert seconds(after, 2e7, crowd=4) == seconds(before, 2e7, crowd=4)
    assert after.with_transport("gloo").network == before.with_transport("gloo").network
    assert before.summing({}) is before


def test_updates_that_were_timed_with_computations_count_for_large_parameters():
    before = crowded()
    known = Link(1.0, 1.0, ((256.0, 1.0), (2e6, 3.0)))
    before = before.replace(device=before.device.updating(known.table, 1.0))
    after = before.updating(((1e6, 1.5), (4e6, 6.0)), 1.25)
    assert after.device.update_seconds([256, 1e6, 4e6]) == 1.0 + 1.5 + 6.0
    assert after.device.update_alone_speedup == 1.25
    assert before.updating((), 1.0) is before
