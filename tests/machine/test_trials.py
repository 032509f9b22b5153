"""Predicted beside measured: real steps of small networks on real ranks, in groups that fit into memory."""

import pytest

from shardwise.commands.accuracy import rows_of
from shardwise.commands.trials import Subject, groups_of, loss_for
from shardwise.machine import Device, Link, Machine, Node, Tier
from shardwise.runtime.calibrate.device import device_name

HERE = Machine(
    "here",
    Device(device_name(), {"float32": 1e10}, 4e9, 1e10, host=True),
    Node(2, 2),
    (Tier("node", 0, Link(1e-5, 1e9)),),
    transport="mpi4py",
    nodes=1,
)


@pytest.mark.parametrize(
    ("sizes", "limit", "groups"),
    [
        ([1, 1, 1], 3, [[0, 1, 2]]),
        ([2, 2, 2], 4, [[0, 1], [2]]),
        # What does not fit alone is tried alone.
        ([9, 1, 1], 4, [[0], [1, 2]]),
        ([], 4, []),
    ],
)
def test_trials_are_alive_together_as_far_as_memory_goes(sizes, limit, groups):
    assert groups_of(sizes, limit) == groups


def test_a_loss_suits_the_output():
    loss, target = loss_for((4, 7, 5, 5))
    assert (type(loss).__name__, tuple(target().shape)) == ("CrossEntropyLoss", (4, 5, 5))
    loss, target = loss_for((4, 1))
    assert (type(loss).__name__, tuple(target().shape)) == ("MSELoss", (4, 1))


def test_real_steps_stand_beside_their_predictions():
    plans = ["spatial={tiles}", "stages=2 micro_batches=2", "spatial=2x1x1"]
    rows, refused = rows_of([Subject("resnet8", (3, 16, 16), 4)], plans, HERE, 2, 2.0)
    # The plan for volumes is refused, by its name, and the others are not lost with it.
    assert [entry["plan"] for entry in refused] == ["spatial=2x1x1"]
    assert [row.plan for row in rows] == ["spatial=2x1", "stages=2 micro_batches=2"]
    for row in rows:
        assert (row.model, row.ranks) == ("resnet8", 2)
        assert 0 < row.measured_seconds < 5
        assert row.measured_spread >= 0
        assert 0 < row.predicted_seconds < 5
        assert row.meanwhile_seconds > 0
        # Memory does not depend on how busy the machine is.
        assert row.predicted_peak_bytes == pytest.approx(row.measured_peak_bytes, rel=0.25)
        assert row.measured_high_water_bytes > row.measured_peak_bytes
