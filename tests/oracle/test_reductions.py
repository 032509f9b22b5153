"""Sums of gradients: priced in the pieces in which the runtime starts them."""

from dataclasses import replace

import pytest
from oracle_cases import machine

from shardwise.oracle import reductions
from shardwise.oracle.reductions import PIECE_BYTES, Bucket, reduce_seconds, shelf_bytes
from shardwise.plan import Plan
from shardwise.plan.mesh import mesh_of
from shardwise.runtime import reducer
from shardwise.runtime.mpi import shelf


def test_the_oracle_knows_how_the_reducer_gathers():
    for name in ("BUCKET_BYTES", "SINGLE_BYTES", "PIECE_BYTES"):
        assert getattr(reductions, name) == getattr(reducer, name)


def test_the_oracle_knows_the_shelf():
    for name in ("BOARDS", "PART_BYTES", "SMALLEST_BYTES", "MOST_RANKS"):
        assert getattr(reductions, name) == getattr(shelf, name)


def test_a_shelf_takes_memory_where_mpi_adds_up_on_one_host():
    mesh = mesh_of(Plan.parse("data=2"))
    small, one, many = (Bucket(frozenset({"w"}), n, (0,), 0) for n in (1000.0, 2.0**20, 2.0**26))
    device = replace(machine().device, host=True)
    here = machine(device=device, transport="mpi4py")
    assert shelf_bytes([small], mesh, here) == 0
    assert shelf_bytes([small, one], mesh, here) == shelf.BOARDS * 2**20
    assert shelf_bytes([one, many], mesh, here) == shelf.BOARDS * shelf.PART_BYTES
    assert shelf_bytes([many], mesh, machine(device=device, transport="gloo")) == 0
    far = mesh_of(Plan.parse(f"data={2 * max(here.node.devices, 2)}"))
    assert shelf_bytes([many], far, here) == 0


def test_a_large_sum_costs_its_pieces():
    mesh, where = mesh_of(Plan.parse("data=2")), machine()

    def seconds(nbytes):
        return reduce_seconds(Bucket(frozenset({"w"}), nbytes, (0,), 0), mesh, where, 1)

    assert seconds(2.5 * PIECE_BYTES) == pytest.approx(2 * seconds(PIECE_BYTES) + seconds(PIECE_BYTES / 2))


def test_one_gradient_needs_no_copy_and_several_do():
    assert Bucket(frozenset({"w"}), 8.0, (0,), 0).gathered_bytes == 0.0
    assert Bucket(frozenset({"w", "b"}), 8.0, (0,), 0).gathered_bytes == 8.0
