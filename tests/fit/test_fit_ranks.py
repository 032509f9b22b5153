"""fit, check, the command line and the examples with real ranks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import fit_cases as cases
import fit_workers as workers
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw
from ranks import run_ranks
from shardwise.training.check import _deviations

ROOT = Path(__file__).resolve().parents[2]


def example(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("plan", "ranks", "most"),
    [("data=2", 2, (11, 11)), ("stages=4 micro_batches=2", 4, (20, 0, 0, 20)), ("spatial=2x1", 2, (20, 20))],
)
def test_each_rank_loads_only_the_samples_that_it_needs(plan, ranks, most):
    results = run_ranks(workers.fitted, ranks, args=(plan,))
    for (loaded, losses, error), bound in zip(results, most, strict=True):
        assert loaded <= bound
        assert losses == results[0][1]
        assert error < 1e-10


@pytest.mark.parametrize("own_order", [False, True], ids=["shuffled", "sampler"])
@pytest.mark.parametrize("plan", ["stages=2", "filter=2"])
def test_ranks_that_read_a_sample_see_the_same_order_and_the_same_random_transforms(plan, own_order):
    results = run_ranks(workers.drawn, 2, args=(plan, own_order))
    assert results[0][0] == results[1][0]
    assert results[0][1] == results[1][1]
    assert len(results[0][0]) == 2 * (18 if own_order else 20)
    assert len({draws[1:] for draws in results[0][0]}) == len(results[0][0])
    assert max(error for *_, error in results) < 1e-10


@pytest.mark.parametrize(("rank", "reason"), [(0, "slow"), (1, "")])
def test_all_ranks_stop_by_rank_0s_clock_and_reason(rank, reason):
    results = run_ranks(workers.stopped_by, 2, args=(rank,), deadline=30)
    assert [stopped for stopped, _ in results] == [reason, reason]
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("plan", ["stages=2", "data=2"])
def test_a_generator_of_mini_batches_is_trained_on_from_its_first(plan):
    for losses, error in run_ranks(workers.streamed, 2, args=(plan,)):
        assert len(losses) == 1
        assert error < 1e-10


def test_a_plain_script_starts_its_own_ranks_and_gets_the_weights_back(monkeypatch):
    monkeypatch.setenv("SHARDWISE_MACHINE", "dgx-a100")
    model, own = cases.classifier(norm=False), cases.classifier(norm=False)
    data = TensorDataset(*cases.images(12))
    rate = 0.05

    def local(named):  # a function of this test: it travels by value
        return torch.optim.SGD([p for _, p in named], lr=rate)

    settings = {"loss": F.cross_entropy, "optimizer": local, "batch_size": 4, "progress": False}
    history = sw.fit(model, data, ranks=2, **settings)
    assert history.ranks == 2
    assert sw.Plan.parse(history.plan).ranks == 2
    alone = sw.fit(own, data, **settings)
    assert history["loss"] == pytest.approx(alone["loss"], rel=1e-12)
    assert cases.error(model.state_dict(), own.state_dict()) < 1e-10


def test_check_says_that_a_plan_is_exact_and_leaves_the_model_alone(capsys):
    model = cases.classifier().float()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    x, y = cases.images(4)
    report = sw.check(model, (x.float(), y), "spatial=2x1", F.cross_entropy)
    assert report.ok
    assert report.worst.error < 1e-10
    assert {"loss", "0", "1.norm", "6"} <= {row.layer for row in report.rows}
    printed = capsys.readouterr().out
    assert "running_mean" in printed
    assert "equal to one device" in printed
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_check_prints_what_to_know_about_the_comparison(capsys):
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(300, 5)).double()
    report = sw.check(model, cases.images(4), "data=1", F.cross_entropy)
    assert report.ok
    assert "note: 1 dropout layers were switched off" in capsys.readouterr().out


def test_check_does_not_pass_over_what_is_no_number():
    model = nn.Sequential(nn.Flatten(), nn.Linear(300, 6), nn.Linear(6, 5)).double()
    with torch.no_grad():
        model[1].bias[0] = float("nan")
    report = sw.check(model, cases.images(4), "data=1", F.cross_entropy, show=False)
    assert not report.ok
    assert {row.tensor for row in report.rows if row.error == float("inf")} >= {"value", "weight gradient"}
    assert "NOT equal" in str(report)


def test_check_counts_a_missing_gradient_as_infinitely_far_off():
    wanted = {"a.weight": torch.ones(2), "a.bias": torch.ones(2), "b.weight": torch.full((2,), torch.nan)}
    found = {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}
    rows = {(row.layer, row.tensor): row.error for row in _deviations(found, wanted, "")}
    assert rows == {("a", "weight"): 0.0, ("a", "bias"): float("inf"), ("b", "weight"): float("inf")}


def test_the_errors_of_these_tests_see_what_is_no_number_or_missing():
    whole, broken = {"a": torch.ones(2), "b": torch.ones(2)}, torch.tensor([1.0, torch.nan])
    assert cases.error(whole, whole) == 0.0
    for found in ({"a": torch.ones(2)}, whole | {"a": broken}, whole | {"b": broken}):
        assert cases.error(found, whole) == float("inf")
    assert cases.error(whole, whole | {"a": broken}) == float("inf")
    assert cases.worst(0.0, float("nan"), 0.0) == float("inf")


def test_check_finds_what_a_plan_changes():
    # Statistics of each rank alone are another mathematics than those of one device.
    results = run_ranks(workers.checked, 2, args=("data=2 batch_norm=local",))
    assert all(not ok for ok, _ in results)
    assert all(layer for _, layer in results)


def test_train_writes_plan_history_and_weights(tmp_path):
    command = [sys.executable, "-m", "shardwise.cli", "train", "resnet8", "--data", "synthetic:3x16x16"]
    command += ["--plan", "spatial=2x1", "-n", "2", "--epochs", "1", "--samples", "16", "--batch-size", "4"]
    command += ["--json", "-o", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["plan"] == "spatial=2x1"
    assert result["last"]["loss"] > 0
    assert sw.Plan.load(tmp_path / "plan.toml") == sw.Plan.parse("spatial=2x1")
    assert "conv1.weight" in torch.load(tmp_path / "weights.pt")


def test_train_names_what_it_cannot_use():
    command = [sys.executable, "-m", "shardwise.cli", "train", "resnet8", "--data", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "synthetic:3x512x512" in done.stderr


def test_the_custom_loop_learns():
    losses = example("custom_loop").main("data=1", 8)
    assert losses[-1] < losses[0]


def test_the_segmentation_learns_where_pixels_do_not_count():
    history = example("segmentation").main("data=1", 3, 16)
    assert history["loss"][-1] < 0.8 * history["loss"][0]


@pytest.mark.full
def test_digits_reach_the_same_accuracy_under_every_plan():
    digits = example("digits")
    found = {plan: digits.train(plan, 8).epochs[-1]["val_accuracy"] for plan in digits.PLANS}
    assert found["data=1"] > 0.95
    assert all(abs(value - found["data=1"]) <= 0.005 for value in found.values()), found
