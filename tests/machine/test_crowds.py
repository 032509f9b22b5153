"""Networks that were measured with several numbers of ranks on a node."""

from shardwise.machine import Device, Link, Machine, Node, Tier


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


def test_ranks_that_share_cores_work_only_a_part_of_a_collective():
    assert crowded().busy_seconds(2, 1.0) == 1.0
    assert crowded().busy_seconds(8, 1.0) == 0.25


def test_a_crowd_survives_the_file(tmp_path):
    crowded().save(tmp_path / "here.toml")
    assert Machine.load(tmp_path / "here.toml") == crowded()
