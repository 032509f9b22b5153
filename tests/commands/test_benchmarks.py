"""`make bench` runs every folder of benchmarks, and those of the oracle time what they say."""

import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardwise.commands.subject import build_model, training_graph

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOLDERS = sorted(path for path in BENCHMARKS.iterdir() if any(path.glob("*.py")))


@pytest.fixture
def load(monkeypatch):
    def loaded(name):
        path = BENCHMARKS / "oracle" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"oracle_{name}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_folder_of_benchmarks_can_be_run(folder):
    assert (folder / "run.py").is_file()


def test_the_oracle_is_timed_before_it_is_held_against_measurements(load):
    words = load("run").commands(["--only-table"])
    assert [Path(line[1]).name for line in words] == ["predictions.py", "search.py", "accuracy.py"]
    assert all(Path(line[1]).is_file() for line in words)
    assert words[-1][-1] == "--only-table"
    # What people wrote into result.md stays.
    assert not any(word.endswith("result.md") for line in words for word in line)


@pytest.mark.parametrize(
    ("plan", "other", "lowered"),
    [
        ("stages=2 schedule=gpipe micro_batches=4", "stages=2 schedule=1f1b micro_batches=4", False),
        ("data=2", "data=2 micro_batches=2", True),
    ],
)
def test_a_new_schedule_finds_its_stages_and_a_new_number_of_micro_batches_does_not(
    load, monkeypatch, plan, other, lowered
):
    predictions = load("predictions")
    monkeypatch.setattr(predictions, "_patience", nullcontext)
    graph = training_graph(build_model("resnet8"), (3, 16, 16), 8)
    times = predictions.measure(graph, plan, other)
    assert times.lowered is lowered
    assert 0 < times.again < times.first
    assert times.other > 0
    assert ("*" in str(times)) is lowered


def test_measurements_that_were_written_before_still_make_a_table(load):
    text = load("accuracy").table(BENCHMARKS / "oracle" / "measured")
    assert "best measured is among the best two" in text
    assert "| resnet50 | 2 | `" in text
