"""The command line of the oracle: what it prints, and the fields of its JSON."""

import json

import pytest
from oracle_cases import machine
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.commands.accuracy import Row

SMALL = ["--input", "3x16x16", "--batch", "4", "--machine", "lassen"]


def shardwise(*arguments):
    found = CliRunner().invoke(app, list(arguments))
    assert found.exit_code == 0, found.output
    return found.output


def test_plan_has_the_fields_of_a_ranking():
    found = json.loads(shardwise("plan", "resnet8", *SMALL, "--ranks", "2", "--keep", "3", "--json"))
    assert len(found["plans"]) == 3
    for plan in found["plans"]:
        assert {"plan", "step_seconds", "samples_per_second", "peak_bytes", "bottleneck"} <= set(plan)
        assert plan["samples_per_second"] == pytest.approx(4 / plan["step_seconds"])
    times = [plan["step_seconds"] for plan in found["plans"]]
    assert times == sorted(times)
    assert found["refused"]
    assert all({"plan", "reason"} <= set(row) for row in found["refused"])
    counts = found["counts"]
    assert set(counts) == {"enumerated", "refused", "pruned", "simulated"}
    assert counts["enumerated"] == counts["refused"] + counts["pruned"] + counts["simulated"]


def test_plan_prints_a_table_with_reasons():
    text = shardwise("plan", "resnet8", *SMALL, "--ranks", "64", "--memory", "16GB")
    assert "samples/s" in text
    assert "Best: " in text
    refused = [line for line in text.splitlines() if line.startswith("refused: ")]
    assert any("samples for" in line and "more like it" in line for line in refused)
    assert len({line.partition(": ")[2].partition(": ")[2] for line in refused}) == len(refused)


def test_where_nothing_fits_plan_says_what_comes_nearest_and_ends_badly():
    arguments = ["plan", "resnet8", *SMALL, "--ranks", "2", "--memory", "1KB"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 2
    found = json.loads(done.output)
    assert found["plans"] == []
    assert any("GB" in row["reason"] for row in found["refused"])
    assert "the nearest plan is" in found["error"]
    assert "the nearest plan is" in str(CliRunner().invoke(app, arguments).exception)


def test_plan_finds_the_fewest_ranks():
    options = [*SMALL, "--ranks", "8", "--find", "fewest-ranks", "--json", "--keep", "1"]
    found = json.loads(shardwise("plan", "resnet8", *options))
    assert found["found"] == {"question": "fewest-ranks", "value": 1}


def test_a_model_of_ones_own_is_named_by_module_and_attribute():
    options = ["--input", "3x16x16", "--batch", "4", "--machine", "abci", "--plan", "spatial=2x1", "--json"]
    found = json.loads(shardwise("predict", "oracle_cases:small_model", *options))
    assert found["plan"] == "spatial=2x1"


def test_predict_breaks_time_and_memory_down_by_rank(tmp_path):
    path = tmp_path / "trace.json"
    options = [*SMALL, "--plan", "data=2 stages=2 micro_batches=2", "--timeline", str(path)]
    found = json.loads(shardwise("predict", "resnet8", *options, "--json"))
    low, high = found["interval"]
    assert low <= found["step_seconds"] <= high
    names = {"forward", "backward", "halo", "stage transfer", "reduction", "bubble", "update", "input"}
    for rank in found["breakdown"]:
        assert names <= set(rank)
        assert sum(rank.values()) == pytest.approx(found["step_seconds"])
    assert found["verdict"] == "fits"
    assert "saves" in found["bottleneck"]
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * found["step_seconds"])
    text = shardwise("predict", "resnet8", *options)
    assert "samples/s" in text
    assert "milliseconds by rank" in text


def test_limits_show_the_table_of_limits_and_bottlenecks():
    found = json.loads(shardwise("limits", "resnet8", "--input", "3x16x16", "--batch", "4", "--json"))
    table = {row["strategy"]: row for row in found["limits"]}
    assert table["data"]["max_ranks"] == 4
    assert table["filter"]["limits"]
    assert table["filter"]["bottlenecks"]
    assert "decided by" in shardwise("limits", "resnet8", "--input", "3x16x16", "--batch", "4")


def test_scaling_shows_every_strategy():
    options = ["--input", "3x16x16", "--batch", "8", "--machine", "lassen", "--ranks", "4"]
    found = json.loads(shardwise("scaling", "resnet8", *options, "--json"))
    assert {p["ranks"] for p in found["points"]} == {1, 2, 4}
    assert "data+spatial" in {p["strategy"] for p in found["points"]}
    assert all(p["plan"] or p["reason"] for p in found["points"])
    assert "strong" in shardwise("scaling", "resnet8", *options, "--strategies", "data,filter")


def test_calibrate_writes_a_file_that_can_be_asked_about(tmp_path, monkeypatch):
    def briefly(output, seconds, transports, *, ranks, name, quiet):
        assert (seconds, transports, quiet) == (5.0, ["gloo"], True)
        found = machine(name=name)
        found.save(output)
        return found

    monkeypatch.setattr("shardwise.runtime.calibrate.calibrate", briefly)
    path = tmp_path / "here.toml"
    options = ["-o", str(path), "--seconds", "5", "--transport", "gloo", "--json"]
    found = json.loads(shardwise("calibrate", *options))
    assert found["output"] == str(path)
    assert found["machine"]["device"]["name"] == "simple"
    options = ["--input", "3x16x16", "--batch", "4", "--machine", str(path), "--json"]
    assert json.loads(shardwise("predict", "resnet8", *options))["verdict"] == "fits"


def test_validate_reports_rows_and_accuracies(monkeypatch):
    rows = [
        Row("resnet8", "data=2", "data", 2, 1.1, 1.0, 0.02, 80, 100, 8, 10),
        Row("resnet8", "filter=2", "filter", 2, 1.5, 2.0, 0.04, 100, 100, 10, 10),
    ]
    monkeypatch.setattr("shardwise.commands.accuracy.rows_of", lambda *_: (rows, []))
    options = ["--models", "resnet8@3x16x16/4", "--plans", "data=2; filter=2", "--machine", "lassen"]
    found = json.loads(shardwise("validate", *options, "--json"))
    names = ("model", "plan", "strategy", "ranks", "predicted_seconds", "measured_seconds", "measured_spread")
    assert {*names, "predicted_peak_bytes", "measured_peak_bytes"} <= set(found["rows"][0])
    assert found["time_accuracy"]["mean"] == pytest.approx((0.9 + 0.75) / 2)
    assert found["time_accuracy"]["by_strategy"] == pytest.approx({"data": 0.9, "filter": 0.75})
    assert found["memory_accuracy"]["by_strategy"] == pytest.approx({"data": 0.8, "filter": 1.0})
    assert "resnet8" in shardwise("validate", *options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "resnet8", "--machine", "lassen", "--ranks", "two"], "ranks: 'two' found"),
        (["plan", "resnet8", "--machine", "lassen", "--ranks", "2", "--memory", "much"], "16GB"),
        (["plan", "resnet8", "--machine", "lassen", "--ranks", "2", "--find", "love"], "largest-batch"),
        (["plan", "resnet8", "--machine", "lassen", "--ranks", "4096"], "lassen has 3168"),
        (["scaling", "resnet8", "--machine", "lassen", "--ranks", "4096"], "lassen has 3168"),
        (["predict", "resnet8", "--machine", "lasen"], "is no preset"),
        (["predict", "resnet8", "--machine", "lassen", "--input", "3,16"], "3x1024x1024"),
        (["predict", "nothing:here", "--machine", "lassen", "--input", "3x8x8"], "cannot be imported"),
        (["scaling", "resnet8", "--machine", "lassen", "--strategies", "magic"], "strategies: 'magic'"),
    ],
)
def test_what_cannot_be_used_is_named_with_what_would_work(arguments, message):
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code != 0
    assert message in str(found.exception)
