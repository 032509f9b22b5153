"""Jobs on several hosts: who measures what, and a real crew that is told that it sits on two hosts."""

from __future__ import annotations

import pytest
import torch

from ranks import run_ranks
from shardwise.machine import Collective, Device, Link, Tier
from shardwise.runtime.calibrate import here, machine, network
from shardwise.runtime.calibrate.crew import crew
from shardwise.runtime.calibrate.hosts import Reach, reaches, span_of
from shardwise.runtime.environment import Place
from shardwise.runtime.session import Session, current


@pytest.mark.parametrize(
    ("hosts", "span"),
    [
        ("aaaa", 4),
        ("aabb", 2),
        ("aaaabbbbcccc", 4),
        # A last host with fewer ranks does not matter; a first one does.
        ("aaab", 3),
        ("aabbb", 2),
        ("abbb", 1),
        # Ranks dealt out in turn: no neighbours share a host.
        ("abab", 1),
    ],
)
def test_a_tier_inside_a_node_joins_ranks_that_always_share_a_host(hosts, span):
    assert span_of(hosts) == span


def test_on_one_host_neighbours_exchange_and_all_ranks_sum():
    assert reaches("aaaaa") == (Reach("node", 0, (0, 1, 2, 3, 4), ((0, 1), (2, 3))),)


def test_on_two_hosts_each_rank_talks_with_the_one_in_its_place_on_the_next():
    inside, between = reaches("aaaabbbbcccc")
    assert inside == Reach("node", 4, (0, 1, 2, 3), ((0, 1), (2, 3)))
    assert (between.name, between.span, between.members) == ("machine", 0, tuple(range(12)))
    assert between.pairs == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(("hosts", "pairs"), [("abab", ((0, 1), (2, 3))), ("abcd", ((0, 1),))])
def test_where_neighbours_are_apart_there_is_only_the_network_between_nodes(hosts, pairs):
    (between,) = reaches(hosts)
    assert (between.name, between.span, between.pairs) == ("machine", 0, pairs)


def test_more_and_more_pairs_exchange_at_once_up_to_all_ranks_of_a_host():
    inside, between = reaches("aaabbb")
    assert (inside.flows, between.flows) == ((1,), (1, 2, 3))
    assert [between.peer(rank) for rank in range(6)] == [3, None, None, 0, None, None]
    assert [between.peer(rank, 2) for rank in range(6)] == [3, 4, None, 0, 1, None]


def measured_on(hosts):
    """Let the ranks of a crew believe that they sit on these hosts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "host_name", lambda: hosts[current().rank])
        with crew() as leads:
            if leads:
                return network.measure_network("gloo", len(hosts), 1.0, sizes=(8, 4096, 262144))
    return None


@pytest.mark.parametrize("transport", ["gloo", "mpi4py"])
def test_a_crew_on_two_hosts_measures_inside_a_node_and_between_nodes(transport):
    inside, between = run_ranks(measured_on, 4, transport, args=("aabb",), deadline=120.0)[0]
    assert [(t.name, t.span, t.crowd) for t in (inside, between)] == [("node", 2, 4), ("machine", 0, 4)]
    assert {c.ranks for c in inside.collectives} == {2}
    assert {c.ranks for c in between.collectives} == {4}
    for tier in (inside, between):
        assert 1e-7 < tier.message_seconds(8) <= tier.message_seconds(262144) < 10
        assert len(tier.collectives) == 5
        assert 0 <= tier.overlap <= 1
    assert inside.contention is None  # there is one pair of ranks in a node
    assert [flows for flows, _ in between.contention.points] == [1.0, 2.0]
    assert inside.jitter is not None


@pytest.fixture
def noted(monkeypatch, tmp_path):
    """Calibrate without ranks; return with how many the network would have been measured."""
    counts = []

    def tiers(transport, size, seconds):
        counts.append(size)
        sums = (Collective("all_reduce", 8, Link(1e-5, 1e9)),)
        inside = Tier("node", 4, Link(1e-6, 1e10), transport=transport, crowd=size)
        return (inside, Tier("machine", 0, Link(1e-5, 1e9), None, sums, transport=transport, crowd=size))

    device = Device("cpu", {"float32": 1e9}, 1e9, 1e9, host=True)
    monkeypatch.setattr(machine, "measure_device", lambda ranks, seconds: (device, 0.0))
    monkeypatch.setattr(machine, "measure_network", tiers)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    return counts


def test_a_crew_is_measured_as_it_is_and_not_called_a_crowd(noted, monkeypatch):
    machine.calibrate(seconds=0.0, transports=["gloo"], quiet=True)
    assert noted == [4, 8]
    noted.clear()
    monkeypatch.setattr(machine, "is_leader", lambda: True)
    session = Session(Place(0, 8, 0, 4, "srun", False), "gloo", torch.device("cpu"), 1, 120.0, True)
    found = here.measured_machine(session, 0.0, quiet=True)
    assert noted == [4]
    assert (found.nodes, found.node.devices) == (2, 4)
    assert [tier.name for tier in found.network] == ["node", "machine"]
    assert (found.tier((0, 3)).name, found.tier((3, 4)).name) == ("node", "machine")
    assert found.tier((0, 4)).collectives[0].ranks == 8


def test_one_rank_on_each_node_has_the_node_for_itself(noted, monkeypatch):
    monkeypatch.setattr(machine, "is_leader", lambda: True)
    session = Session(Place(0, 3, 0, 1, "srun", False), "gloo", torch.device("cpu"), 1, 120.0, True)
    found = here.measured_machine(session, 0.0, quiet=True)
    assert (noted, found.nodes, found.node.devices) == ([1], 3, 1)
