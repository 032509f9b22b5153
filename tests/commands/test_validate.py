"""`shardwise validate`: accuracies of time and of both kinds of memory, by strategy, and the ranking."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.commands.accuracy import Row, kept, report, repriced
from shardwise.commands.subject import build_model, training_graph
from shardwise.commands.trials import Subject
from shardwise.machine import Machine
from shardwise.oracle import Oracle
from shardwise.oracle.kernels import Roofline
from shardwise.oracle.profile import Profile
from shardwise.plan import Plan

ROWS = [
    Row("resnet8", "data=2", "data", 2, 1.1, 1.0, 0.02, 80, 100, 9, 10),
    Row("resnet8", "filter=2", "filter", 2, 1.5, 2.0, 0.04, 100, 100, 10, 20),
    Row("resnet8", "spatial=2x1", "spatial", 2, 1.2, 0.9, 0.01, 100, 100, 10, 10),
    Row("resnet8", "data=4", "data", 4, 1.0, 2.0, 0.02, 50, 100, 5, 10),
]
UNWEIGHED = [replace(row, measured_peak_bytes=0, measured_high_water_bytes=0) for row in ROWS]


def validate(monkeypatch, rows, *options):
    monkeypatch.setattr("shardwise.commands.accuracy.rows_of", lambda *_: (list(rows), []))
    words = ["validate", "--models", "resnet8@3x16x16/4", "--machine", "lassen", *options]
    found = CliRunner().invoke(app, words, env={"COLUMNS": "250"})
    assert found.exit_code == 0, found.output
    return found.output


def test_the_memory_of_the_process_has_an_accuracy_of_its_own(monkeypatch):
    found = json.loads(validate(monkeypatch, ROWS, "--json"))
    assert found["memory_accuracy"]["mean"] == pytest.approx((0.8 + 1 + 1 + 0.5) / 4)
    assert found["high_water_accuracy"]["mean"] == pytest.approx((0.9 + 0.5 + 1 + 0.5) / 4)
    assert found["high_water_accuracy"]["by_strategy"] == pytest.approx(
        {"data": 0.7, "filter": 0.5, "spatial": 1.0}
    )
    text = validate(monkeypatch, ROWS)
    assert "high-water accuracy" in text
    assert "72.5 %" in text


def test_strategies_are_told_apart_by_ranks_too():
    found = report(ROWS, [])["time_accuracy"]
    assert found["by_strategy"]["data"] == pytest.approx((0.9 + 0.5) / 2)
    assert set(found["by_ranks_and_strategy"]) == {"2", "4"}
    assert found["by_ranks_and_strategy"]["2"]["data"] == pytest.approx(0.9)
    assert found["by_ranks_and_strategy"]["4"] == pytest.approx({"data": 0.5})


def test_memory_that_was_not_measured_is_null_and_a_dash(monkeypatch):
    found = json.loads(validate(monkeypatch, UNWEIGHED, "--json"))
    for name in ("memory_accuracy", "high_water_accuracy"):
        assert found[name] == {"mean": None, "by_strategy": {}, "by_ranks_and_strategy": {}}
    assert found["time_accuracy"]["mean"] is not None
    (mean,) = [line for line in validate(monkeypatch, UNWEIGHED).splitlines() if " mean " in line]
    assert [cell.strip() for cell in mean.split("│")[4:6]] == ["-", "-"]


def test_nothing_measured_at_all_is_no_error(monkeypatch):
    assert json.loads(validate(monkeypatch, [], "--json"))["time_accuracy"]["mean"] is None
    assert "mean" in validate(monkeypatch, [])


def test_a_ranking_says_whether_the_best_is_among_the_best_two_predicted(monkeypatch):
    two, four = report(ROWS, [])["ranking"]
    assert (two["chosen"], two["best"], two["best_in_top_two"]) == ("data=2", "spatial=2x1", True)
    assert four["best_in_top_two"]
    missed = [*ROWS[:2], replace(ROWS[2], predicted_seconds=1.6), ROWS[3]]
    assert not report(missed, [])["ranking"][0]["best_in_top_two"]
    assert "which is among the best two predicted" in validate(monkeypatch, ROWS)
    assert "which is not among the best two predicted" in validate(monkeypatch, missed)


def test_what_was_kept_is_predicted_once_more(tmp_path):
    subject, machine = Subject("resnet8", (3, 16, 16), 4), Machine.load("ethernet-cpu")
    device = machine.device
    for when, path in enumerate(kept(tmp_path, subject, 2)):
        profile = Profile(device.name, device.threads, Roofline(device))
        profile.meetings = {5: (1.0, 1e-3, when * 1e-4)}
        profile.save(path)
    two, *_, four = repriced([*ROWS[:1], ROWS[0]], subject, machine, tmp_path)
    graph = training_graph(build_model("resnet8"), subject.shape, subject.batch)
    expected = Oracle(graph, machine).seconds(Plan.parse("data=2"), subject.batch)
    assert two == four
    assert two.predicted_seconds == pytest.approx(expected)
    assert two.meanwhile_seconds > two.predicted_seconds
    assert two.measured_seconds == ROWS[0].measured_seconds
