"""Real ranks measure this machine for a few seconds."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.commands.subject import build_model, training_graph
from shardwise.graph import capture
from shardwise.machine import Device, Machine
from shardwise.oracle import Direction, Roofline, Task
from shardwise.oracle.moves import move_of
from shardwise.oracle.price import price_stage
from shardwise.oracle.profile import Profile, cache_path
from shardwise.plan import Plan
from shardwise.program import Regrid
from shardwise.program.lowered import lower
from shardwise.runtime.calibrate import calibrate, profile_kernels
from shardwise.runtime.calibrate.chains import Chain
from shardwise.runtime.calibrate.device import device_name, time_device
from shardwise.runtime.calibrate.kernels import in_turn
from shardwise.runtime.calibrate.network import measure_network, rising
from shardwise.runtime.calibrate.replay import Replay
from shardwise.runtime.calibrate.timer import interruptions, share_of_waits
from shardwise.runtime.calibrate.updates import update_link
from shardwise.runtime.calibrate.values import stored
from shardwise.runtime.in_place import rectify
from shardwise.runtime.poller import cores
from shardwise.runtime.stage import BoundStage
from shardwise.runtime.wire import LoneWire, Wires

sys.path.insert(0, str(Path(__file__).parent.parent / "oracle"))
from oracle_cases import machine, stage


def test_times_that_fall_with_size_are_corrected():
    assert rising([(8, 5.0), (64, 2.0), (512, 3.0)]) == ((8, 2.0), (64, 2.0), (512, 3.0))


def test_two_ranks_time_messages_and_collectives():
    (tier,) = measure_network("gloo", 2, 1.0, sizes=(8, 4096, 262144))
    assert (tier.name, tier.span, tier.crowd, tier.links) == ("node", 0, 2, 1)
    assert {c.ranks for c in tier.collectives} == {2}
    names = {"all_reduce", "all_reduces", "all_gather", "reduce_scatter", "all_to_all"}
    assert {c.name for c in tier.collectives} == names
    assert tier.jitter is not None
    assert all(seconds > 0 and part >= 0 for seconds, part in tier.jitter.points)
    assert 1e-7 < tier.message_seconds(8) <= tier.message_seconds(262144) < 10
    assert all(c.link.seconds(8) > 0 for c in tier.collectives)
    assert 0 <= tier.overlap <= 1
    assert tier.waiting_seconds == 0.0


def test_ranks_that_share_cores_tell_what_waiting_takes():
    (tier,) = measure_network("gloo", 2 * cores(), 1.0, sizes=(8, 4096))
    assert 1e-6 < tier.waiting_seconds < 1e-2


def test_interruptions_of_some_computations_are_shared_out_over_all():
    times = {("a", "forward"): [1.0, 1.0, 2.0], ("b", "forward"): [1.0, 2.0, 1.0]}
    assert interruptions(times, [2.0, 3.0, 3.0]) == pytest.approx(1.5)
    assert interruptions(times, [1.0, 1.0, 1.0]) == 1.0


def test_waits_of_a_crowd_are_a_share_of_its_computations():
    times = {("a", "forward"): [1.0, 1.0, 2.0], ("b", "forward"): [1.0, 2.0, 1.0]}
    assert share_of_waits(times, [0.5, 0.5, 9.0]) == pytest.approx(0.25)
    assert share_of_waits(times, [-0.1, -0.1, 0.3]) == 0.0
    assert share_of_waits({}, []) == 0.0


def test_stages_of_a_pipeline_are_timed_beside_each_other_and_all_else_together():
    graph = training_graph(build_model("resnet20"), (3, 8, 8), 4)
    step = lower(graph, Plan.parse("stages=2 micro_batches=2"))
    stages = [Chain.whole(step.stage(s, 0, 0), 0) for s in range(2)]
    alike = [
        Chain.whole(lower(graph, Plan.parse(text)).stage(0, 0, 0), 0) for text in ("data=2", "spatial=2x1")
    ]
    assert [chain.is_lone for chain in stages] == [True, True]
    assert [chain.is_lone for chain in alike] == [False, False]
    timers = [SimpleNamespace(chain=chain) for chain in (stages[0], alike[0], stages[1], alike[1])]
    orders = [[t.chain for t in in_turn(timers, rank)] for rank in range(3)]
    assert orders[0] == orders[2] == [*alike, *stages]
    assert orders[1] == [*alike, *reversed(stages)]


def test_parameters_are_updated_in_the_time_of_their_size():
    link = update_link([{256: 1e-5, 1024: 4e-5}, {256: 3e-5, 1024: 4e-5}])
    device = Device("here", {"float32": 1e9}, 1e9, 1e9, update=link)
    assert device.update_seconds([256, 1024]) == pytest.approx(6e-5)


def test_a_rank_times_its_device():
    torch.set_num_threads(1)
    found = time_device(0.5)
    assert 1e8 < found["peak float32"] < 1e13
    assert 1e8 < found["memory_bandwidth"] < 1e13
    assert 0 < found["overhead_forward_seconds"] < 1e-2
    assert 0 < found["updates"][256] < 1e-2
    assert found["updates"][256] < found["updates"][8 << 20] < found["updates"][32 << 20]
    assert 0 <= found["overhead_segment_forward_seconds"] < 1e-2
    assert {"convolution", "convolution/backward_weight", "linear/backward_input"} <= set(found["curves"])


@pytest.mark.full  # two jobs of two ranks and every size of message
def test_a_short_calibration_gives_a_usable_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    stale = cache_path(device_name(), 1)
    Profile(device_name(), 1, Roofline(machine().device)).save(stale)
    here = calibrate(tmp_path / "here.toml", seconds=4.0, quiet=True)
    assert Machine.load(tmp_path / "here.toml") == here
    assert here.assumed(["device.memory_bandwidth", "tiers.node.point_to_point.table"]) == ()
    assert all(0 < y <= 1 for curve in here.device.efficiency.values() for _, y in curve.points)
    assert here.with_transport("gloo").tier((0, 1)).transport == "gloo"
    assert here.input_bytes_per_second > 1e7
    assert not stale.exists()


def test_replayed_operations_overwrite_what_the_runtime_overwrites():
    """Rectified in place behind a norm, as in a step; where a second reader comes, not."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
            self.last = torch.nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = self.last(torch.relu(self.norm(self.conv(x))))
            return y + torch.relu(y)

    graph = capture(Net(), torch.zeros(2, 3, 8, 8), training=True, check=False)
    program = lower(graph, Plan()).stage(0, 0, 0)
    chain = Chain.whole(program, 0)
    bound = BoundStage(program, 0, stored(chain), Wires(*[LoneWire()] * 3), torch.device("cpu"))
    run = [call[0] is rectify for step in bound.steps for call in step.calls]
    replay = Replay(chain, 0.0)
    assert [item.run is rectify for item in replay.items] == run
    assert [op.layer.op for op, there in zip(program.ops, run, strict=True) if there] == ["relu"]
    replay.prepare()
    times = {}
    replay.round(times)
    assert replay.refused == {}
    assert {direction for key, direction in times if key.startswith("relu")} == {"forward", "backward_input"}


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
    # What was measured with a core for each is measured in a crowd too when asked for, and keeps its time.
    times = {key: entry.seconds for key, entry in profile.entries.items()}
    assert not any(entry.crowded for entry in profile.entries.values())
    assert profile_kernels(profile, [program], seconds=5.0, ranks=2, crowd=4) == []
    assert {key: profile.entries[key].seconds for key in times} == times
    # Sums of gradients were timed in turn with them, by as many ranks as computed and by all.
    for ranks in (2, 4):
        ((small, few), (large, many)) = profile.sums()["gloo", ranks]
        assert small < large
        assert 0 < few < many
    factors = [factor for entry in profile.entries.values() for factor in entry.crowded.values()]
    assert len(factors) >= len(times)
    assert all(1.0 <= factor < 1000.0 for factor in factors)
