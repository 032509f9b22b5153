"""plan="auto": what it may choose, that all ranks agree, and what is said about the prediction afterwards."""

from __future__ import annotations

import dataclasses
import time

import auto_workers as workers
import fit_cases as cases
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from ranks import run_ranks
from shardwise.machine import Curve, Device, Link, Machine, Node, Tier
from shardwise.oracle import Prediction
from shardwise.plan import Plan
from shardwise.runtime.calibrate.here import known_machine, machine_path
from shardwise.runtime.environment import Place
from shardwise.runtime.memory import PeakWatch
from shardwise.runtime.session import Session
from shardwise.training.auto import changes_numbers, is_open, slots_of
from shardwise.training.compare import Measured, comparison
from shardwise.training.loss_graph import loss_graph


@pytest.fixture
def machine(tmp_path):
    """A file of a machine whose messages cost nothing, so that splitting pays."""
    device = Device("fast wires", {"float32": 1e9, "float64": 1e9}, 1e9, 1e9)
    Machine("here", device, Node(2, 2), (Tier("node", 0, Link(1e-9, 1e12)),)).save(tmp_path / "m.toml")
    return str(tmp_path / "m.toml")


def root_of_squares(output, target):
    return ((output - target) ** 2).sum().sqrt()


def session(backend="gloo", size=2):
    place = Place(0, size, 0, size, "test", False)
    return Session(place, backend, torch.device("cpu"), 1, 120.0, True)


@pytest.mark.parametrize("norm", [True, False])
def test_all_ranks_train_under_one_plan_with_the_numbers_of_one_device(machine, norm):
    results = run_ranks(workers.chosen, 2, args=(machine, norm))
    histories = [history for history, _ in results]
    assert histories[0].plan == histories[1].plan
    assert Plan.parse(histories[0].plan).ranks == 2
    assert all(error < 1e-10 for _, error in results)
    # Both ranks know what was predicted, and measured the same together.
    assert histories[0].predicted == histories[1].predicted
    assert histories[0].predicted["step_seconds"] > 0
    assert histories[0].measured == histories[1].measured
    assert histories[0].measured["step_bytes"] > 0


def test_when_nothing_fits_every_rank_is_told(machine, tmp_path):
    known = Machine.load(machine)
    small = known.replace(device=dataclasses.replace(known.device, memory_bytes=10.0))
    small.save(tmp_path / "small.toml")
    said = run_ranks(workers.refused, 2, args=(str(tmp_path / "small.toml"),))
    assert said[0] == said[1]
    assert "no plan for 2 ranks" in said[0]


def test_an_open_halo_is_settled_the_same_on_all_ranks(machine, tmp_path):
    known = Machine.load(machine)
    # A second per message: as few exchanges as possible.
    slow = known.replace(tiers=(Tier("node", 0, Link(1.0, 1e12)),))
    slow.save(tmp_path / "slow.toml")
    plan = "spatial=2x1 halo=auto tail=replicate"
    found = run_ranks(workers.settled, 2, args=(str(tmp_path / "slow.toml"), plan))
    assert found[0] == found[1]
    assert Plan.parse(found[0]).halo not in ("auto", "layer")


def test_stages_are_cut_by_price_where_the_machine_is_known(machine, tmp_path):
    known = Machine.load(machine)
    # Only operations cost anything here; the rule for unknown machines counts bytes too.
    curves = {"convolution": Curve(((1.0, 1.0),))}
    slow = dataclasses.replace(
        known.device, peak_flops={"float64": 1e6}, memory_bandwidth=1e12, efficiency=curves
    )
    known.replace(device=slow).save(tmp_path / "slow.toml")
    found = run_ranks(workers.settled, 2, args=(str(tmp_path / "slow.toml"), "stages=2 micro_batches=4"))
    assert found[0] == found[1]
    assert len(Plan.parse(found[0]).cuts) == 1
    given = run_ranks(workers.settled, 2, args=(str(tmp_path / "slow.toml"), found[0]))
    assert given == found


def test_the_ranks_of_a_job_measure_together_what_rank_0_asks():
    assert run_ranks(workers.measured_by_the_job, 2, args=(workers.__name__,)) == [[20, 21, 40, 41], None]


def test_auto_refuses_what_would_change_the_numbers():
    with_norm, without = (
        sw.capture(cases.classifier(norm=norm), cases.images(4)[0], training=True) for norm in (True, False)
    )
    parts = Plan.parse("stages=2 micro_batches=2")
    assert "batch norm" in changes_numbers(with_norm, parts)
    assert changes_numbers(without, parts) == ""
    assert changes_numbers(with_norm, Plan.parse("data=2")) == ""
    ending = loss_graph(root_of_squares, without.output_specs, torch.zeros(4, 5, dtype=torch.float64))
    assert "no mean over samples" in changes_numbers(without, parts, ending)
    assert changes_numbers(without, parts, ending, "micro-batch") == ""
    assert changes_numbers(without, Plan.parse("spatial=2x1"), ending) == ""


def test_optimizers_are_known_by_what_they_keep():
    parameters = list(nn.Linear(2, 2).parameters())
    kept = {
        0.0: torch.optim.SGD(parameters, lr=0.1),
        1.0: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        2.0: torch.optim.AdamW(parameters),
        3.0: torch.optim.Adam(parameters, amsgrad=True),
    }
    assert all(slots_of(optimizer) == slots for slots, optimizer in kept.items())


def test_a_miss_of_more_than_fifteen_percent_is_reported():
    memory = ({"activations": 90e6, "weights": 1e9},)
    predicted = Prediction(1.0, (0.9, 1.1), 4, ({"forward": 1.0},), memory, 1e10)
    near = comparison(predicted, Measured(1.1, 100_000_000))
    assert "1 s predicted, 1.1 s measured" in near
    assert "90 MB predicted, 100 MB measured" in near
    assert "missed" not in near
    far = comparison(predicted, Measured(2.0, 100_000_000))
    assert "missed the step time by 50 %" in far
    assert "memory of a step by" not in far


def test_the_machine_is_what_the_user_says_then_a_file_then_what_was_measured(machine, tmp_path, monkeypatch):
    monkeypatch.delenv("SHARDWISE_MACHINE", raising=False)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert known_machine(session()) is None
    here = Machine.load(machine)
    mine = here.replace(device=dataclasses.replace(here.device, name="this one"))
    monkeypatch.setattr("shardwise.runtime.calibrate.here.device_name", lambda: "this one")
    path = machine_path(session())
    path.parent.mkdir()
    mine.save(path)
    assert known_machine(session())[1] == str(path)
    assert machine_path(session("mpi4py")) != path
    # A file of another device is not this machine.
    here.save(tmp_path / "here.toml")
    assert known_machine(session())[1] == str(path)
    mine.save(tmp_path / "here.toml")
    assert known_machine(session())[1] == "here.toml"
    monkeypatch.setenv("SHARDWISE_MACHINE", "lassen")
    assert known_machine(session())[0].name == "lassen"
    assert known_machine(session(), "abci")[0].name == "abci"


def test_what_was_there_before_a_step_is_no_part_of_its_memory():
    watch = PeakWatch()
    watch.start()
    before = torch.ones(1000)
    time.sleep(0.002)
    start = time.time_ns()
    after = torch.ones(500) + 1
    peak = watch.stop(start)
    assert 4000 <= peak.bytes < 2 * 4000
    assert len(before) == 2 * len(after)


def test_one_rank_needs_no_oracle():
    settings = {"loss": F.cross_entropy, "optimizer": cases.sgd, "batch_size": 4, "progress": False}
    history = sw.fit(cases.classifier(), torch.utils.data.TensorDataset(*cases.images(8)), **settings)
    assert history.plan == "data=1"
    assert history.predicted == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data=2", False),
        ("spatial=2x1", True),
        ("spatial=2x1 tail=replicate", False),
        ("spatial=2x1 tail=replicate halo=auto", True),
        ("stages=2", True),
    ],
)
def test_what_a_plan_leaves_open_is_left_to_the_oracle(text, expected):
    assert is_open(Plan.parse(text)) is expected


def test_stages_are_not_open_where_a_limit_of_memory_cuts_them():
    assert not is_open(Plan.parse("stages=2"), cut=False)
