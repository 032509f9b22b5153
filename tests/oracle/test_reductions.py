"""Sums of gradients: priced in the pieces in which the runtime starts them."""

import pytest
from oracle_cases import machine

from shardwise.oracle import reductions
from shardwise.oracle.reductions import PIECE_BYTES, Bucket, reduce_seconds
from shardwise.plan import Plan
from shardwise.plan.mesh import mesh_of
from shardwise.runtime import reducer


def test_the_oracle_knows_how_the_reducer_gathers():
    for name in ("BUCKET_BYTES", "SINGLE_BYTES", "PIECE_BYTES"):
        assert getattr(reductions, name) == getattr(reducer, name)


def test_a_large_sum_costs_its_pieces():
    mesh, where = mesh_of(Plan.parse("data=2")), machine()

    def seconds(nbytes):
        return reduce_seconds(Bucket(frozenset({"w"}), nbytes, (0,), 0), mesh, where, 1)

    assert seconds(2.5 * PIECE_BYTES) == pytest.approx(2 * seconds(PIECE_BYTES) + seconds(PIECE_BYTES / 2))


def test_one_gradient_needs_no_copy_and_several_do():
    assert Bucket(frozenset({"w"}), 8.0, (0,), 0).gathered_bytes == 0.0
    assert Bucket(frozenset({"w", "b"}), 8.0, (0,), 0).gathered_bytes == 8.0
