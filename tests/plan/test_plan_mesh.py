from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan import Direction, Mesh, Plan, mesh_of

meshes = st.builds(
    Mesh,
    st.integers(1, 4),
    st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple),
    st.booleans(),
    st.none() | st.integers(1, 9),
)


@given(meshes)
def test_every_rank_of_the_world_has_one_place(mesh):
    places = [mesh.place(rank) for rank in range(mesh.size)]
    assert sorted(places) == sorted(itertools.product(range(mesh.data), range(mesh.positions)))
    assert all(mesh.world_rank(*place) == rank for rank, place in enumerate(places))


@given(meshes)
def test_roles_and_groups_say_the_same(mesh):
    for replica, position in itertools.product(range(mesh.data), range(mesh.positions)):
        for role in mesh.roles(position):
            group = mesh.group(replica, role.stage, role.direction)
            assert group[role.member] == mesh.world_rank(replica, position)
            assert len(group) == mesh.widths[role.stage]


@given(meshes)
def test_a_stage_is_reduced_over_all_that_hold_it(mesh):
    for stage in range(mesh.stages):
        held = {r for r in range(mesh.size) if stage in mesh.hosted(mesh.place(r)[1])}
        assert set(mesh.reduction_group(stage)) == held
        slices = [mesh.slice_group(stage, member) for member in range(mesh.widths[stage])]
        assert set().union(*slices) == held


def test_going_up_mirrors_ranks_not_stages():
    mesh = mesh_of(Plan.parse("data=2 stages=2x2|1|1 schedule=gems-mast"))
    assert mesh.group(0, 0, Direction.UP) == (5, 4, 3, 2)
    assert mesh.group(1, 2, Direction.UP) == (6,)
    assert mesh.reduction_group(1) == (1, 4, 7, 10)
    assert [role.stage for role in mesh.roles(3)] == [0, 0]


def test_adjacent_ranks_share_a_stage():
    mesh = mesh_of(Plan.parse("data=2 stages=2 spatial=2x2"), ranks_per_node=4)
    groups = [mesh.group(r, s) for r in range(2) for s in range(2)]
    assert groups == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]


def test_wide_groups_are_kept_on_one_node_where_the_plain_order_would_straddle():
    plain, packed = Mesh(2, (4, 1, 1)), Mesh(2, (4, 1, 1), ranks_per_node=4)
    assert plain.group(1, 0) == (6, 7, 8, 9)
    assert packed.group(1, 0) == (4, 5, 6, 7)
    assert all(len(packed.nodes(packed.group(r, 0))) == 1 for r in range(2))


@given(meshes)
def test_nodes_never_make_more_groups_straddle(mesh):
    plain = Mesh(mesh.data, mesh.widths, mesh.bidirectional)
    node = mesh.ranks_per_node or mesh.size

    def straddling(m):
        groups = (m.group(r, s, d) for r in range(m.data) for s in range(m.stages) for d in m.directions)
        return sum(len({rank // node for rank in group}) > -(-len(group) // node) for group in groups)

    assert straddling(mesh) <= straddling(plain)
