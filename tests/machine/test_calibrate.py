"""Real ranks measure this machine for a few seconds."""

import sys
from pathlib import Path

import pytest
import torch

from shardwise.machine import Machine
from shardwise.oracle import Direction, Roofline, Task
from shardwise.oracle.moves import move_of
from shardwise.oracle.price import price_stage
from shardwise.oracle.profile import Profile
from shardwise.program import Regrid
from shardwise.runtime.calibrate import calibrate, profile_kernels
from shardwise.runtime.calibrate.device import time_device
from shardwise.runtime.calibrate.network import measure_network, rising

sys.path.insert(0, str(Path(__file__).parent.parent / "oracle"))
from oracle_cases import machine, stage


def test_times_that_fall_with_size_are_corrected():
    assert rising([(8, 5.0), (64, 2.0), (512, 3.0)]) == ((8, 2.0), (64, 2.0), (512, 3.0))


def test_two_ranks_time_messages_and_collectives():
    tier = measure_network("gloo", 2, 1.0, sizes=(8, 4096, 262144))
    assert {c.name for c in tier.collectives} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert 1e-7 < tier.message_seconds(8) <= tier.message_seconds(262144) < 10
    assert all(c.link.seconds(8) > 0 for c in tier.collectives)
    assert 0 <= tier.overlap <= 1


def test_a_rank_times_its_device():
    torch.set_num_threads(1)
    found = time_device(0.5)
    assert 1e8 < found["peak float32"] < 1e13
    assert 1e8 < found["memory_bandwidth"] < 1e13
    assert 0 < found["overhead_forward_seconds"] < 1e-2
    assert 0 < found["update_overhead_seconds"] < 1e-2
    assert 0 <= found["overhead_segment_forward_seconds"] < 1e-2
    assert {"convolution", "convolution/backward_weight", "linear/backward_input"} <= set(found["curves"])


@pytest.mark.full  # two jobs of two ranks and every size of message
def test_a_short_calibration_gives_a_usable_machine(tmp_path):
    here = calibrate(tmp_path / "here.toml", seconds=4.0, quiet=True)
    assert Machine.load(tmp_path / "here.toml") == here
    assert here.assumed(["device.memory_bandwidth", "tiers.node.point_to_point.table"]) == ()
    assert all(0 < y <= 1 for curve in here.device.efficiency.values() for _, y in curve.points)
    assert here.with_transport("gloo").tier((0, 1)).transport == "gloo"


def test_kernels_of_a_program_are_measured_on_busy_ranks():
    program = stage("spatial=2x1")
    tasks = [Task.of(op, r) for op in program.ops if not isinstance(op, Regrid) for r in range(2)]
    profile = Profile("here", 1, Roofline(machine().device))
    assert profile_kernels(profile, [program], seconds=10.0, ranks=2) == []
    assert profile.refused == {}
    assert profile_kernels(profile, [program], seconds=10.0, ranks=2) == []
    moves = [move_of(op, r) for op in program.ops if isinstance(op, Regrid) for r in range(2)]
    assert moves
    assert all(profile.moving(move).flag == "" and profile.moving(move).seconds > 0 for move in moves)
    for task in tasks:
        assert profile.seconds(task, Direction.FORWARD).flag == ""
        assert 0 < profile.seconds(task, Direction.FORWARD).seconds < 1
    # Nothing that a step is priced from had to be guessed.
    assert price_stage(program, machine(), profile).flags == set()
    conv = next(task for task in tasks if task.layer.op == "conv")
    assert profile.room(conv, Direction.FORWARD) >= conv.out.size * 4
