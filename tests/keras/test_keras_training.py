"""Keras models train split as they train unsplit: one step, whole fits, files."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import cache

import keras
import numpy as np
import pytest
import torch
from keras_models import double_precision, masked
from keras_workers import (
    by_strategy,
    compiled,
    continued,
    data,
    dropped,
    housekeeping,
    loaded_alone,
    saved,
    step_difference,
    trained,
    two_outputs,
    without_weights,
)

import shardwise as sw
from ranks import run_ranks
from shardwise.keras import plan_of
from shardwise.keras.refusals import check_statistics
from shardwise.plan import PlanError

RELOAD = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np
x = np.load(sys.argv[1] + "/x.npy")
for name in sys.argv[2:]:
    model = keras.models.load_model(f"{sys.argv[1]}/{name}.keras")
    np.save(f"{sys.argv[1]}/{name}.npy", model.predict(x, verbose=0))
sys.exit("shardwise" in sys.modules or not model.optimizer.built)
"""


@pytest.mark.parametrize("plan", ["stages=2", "spatial=2x1", "data=2", "filter=2"])
@pytest.mark.parametrize("name", ["residual", "everything", "channels_first"])
def test_one_step_on_two_ranks_equals_keras(name, plan):
    assert max(run_ranks(step_difference, 2, args=(name, plan, 4))) < 1e-9


@pytest.mark.parametrize(
    "name",
    [
        "sequential",
        "several",
        "own_layers",
        "subclassed",
        "told",
        "blocks",
        "masked",
        "by_name",
        "on_tensors",
    ],
)
def test_one_step_of_unusual_models_on_two_stages_equals_keras(name):
    assert max(run_ranks(step_difference, 2, args=(name, "stages=2", 4))) < 1e-9


@pytest.mark.parametrize("plan", ["stages=2", "spatial=2x1"])
def test_one_step_of_an_application_of_keras_equals_keras(plan):
    assert max(run_ranks(step_difference, 2, args=("mobile", plan, 2))) < 1e-9


def test_a_model_that_cannot_be_entered_runs_whole_on_each_of_two_replicas():
    assert max(run_ranks(step_difference, 2, args=("unpredictable", "data=2", 4))) < 1e-9


def test_statistics_of_a_layer_that_runs_whole_are_refused_for_replicas():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = sw.capture(masked(), torch.randn(4, 6, 4), training=True)
    with pytest.raises(ValueError, match="batch_norm=local"):
        check_statistics(graph, sw.Plan.parse("data=2"))
    check_statistics(graph, sw.Plan.parse("data=2 batch_norm=local"))


def test_one_step_on_tiled_and_plain_stages_equals_keras():
    assert max(run_ranks(step_difference, 4, args=("residual", "stages=2x1|1|1", 4))) < 1e-9


def distance(found, wanted):
    assert list(found) == list(wanted)
    return max(
        abs(a - b) / max(abs(b), 1e-6) for k in wanted for a, b in zip(found[k], wanted[k], strict=True)
    )


@cache
def stock(case="plain", *, double=True, epochs=4):
    """Train with stock Keras in this process, once for all plans."""
    return trained(None, case, double=double, epochs=epochs)


@pytest.mark.parametrize(("plan", "ranks"), [("stages=2", 2), ("stages=3", 3), ("spatial=2x1", 2)])
def test_history_of_four_epochs_equals_stock_fit_to_six_digits(plan, ranks):
    history, predictions = stock()
    for found, outputs in run_ranks(trained, ranks, args=(plan,), deadline=120):
        assert distance(found, history) < 1e-6
        assert np.abs(outputs - predictions).max() < 1e-5


@pytest.mark.parametrize("case", ["weights", "clipped", "stopped"])
def test_weights_schedules_clipping_penalties_and_callbacks_are_keras_own(case):
    for found, _ in run_ranks(trained, 2, args=("stages=2", case), deadline=120):
        assert distance(found, stock(case)[0]) < 1e-6


def test_history_in_single_precision_is_close():
    for found, _ in run_ranks(trained, 2, args=("stages=2", "plain"), kwargs={"double": False}):
        assert distance(found, stock(double=False)[0]) < 1e-3


def test_two_stages_with_two_replicas_equal_two_replicas():
    hybrid = run_ranks(trained, 4, args=("data=2 stages=2",), deadline=120)[0][0]
    replicas = run_ranks(trained, 2, args=("data=2",), deadline=120)[0][0]
    assert distance(hybrid, replicas) < 1e-6


def test_one_process_trains_like_stock_fit():
    history, predictions = stock(epochs=2)
    found, outputs = trained("data=1", epochs=2)
    assert distance(found, history) < 1e-6
    assert np.abs(outputs - predictions).max() < 1e-5


def test_losses_and_metrics_of_several_outputs_are_keras_own():
    wanted = two_outputs(None)
    for found in run_ranks(two_outputs, 2, args=("stages=2",)):
        assert distance(found, wanted) < 1e-3


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return a folder with weights, and what stock Keras makes of them in several fits."""
    folder = tmp_path_factory.mktemp("start")
    with double_precision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(seed=3).save_weights(folder / "start.weights.h5")
    return str(folder), continued(None, str(folder))


@pytest.mark.parametrize(
    ("plan", "weightless"), [("filter=2", False), ("filter=2", True), ("stages=2", True)]
)
def test_further_fits_go_on_from_the_weights_and_the_optimizer_of_the_last_or_from_loaded_ones(
    start, plan, weightless
):
    folder, (losses, state) = start
    for found, own in run_ranks(continued, 2, args=(plan, folder), kwargs={"weightless": weightless}):
        assert distance(found, losses) < 1e-9
        for a, b in zip(own, state, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


def test_weights_that_one_rank_alone_loads_are_refused_for_a_weightless_model(start):
    assert all("load_weights" in text for text in run_ranks(loaded_alone, 2, args=(start[0],)))


def test_saved_models_reload_without_shardwise_and_predict_the_same(tmp_path):
    (first, plan), (second, _) = run_ranks(saved, 2, args=(str(tmp_path),), deadline=120)
    assert "stages=2" in plan
    assert "cuts=add" in plan
    np.testing.assert_array_equal(first, second)
    names = ("model", "checkpoint-2")
    command = [sys.executable, "-c", RELOAD, str(tmp_path), *names]
    assert subprocess.run(command, check=False).returncode == 0
    for name in names:
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), first, rtol=1e-5, atol=1e-6)


def test_callbacks_decide_alike_on_all_ranks_and_one_of_them_writes(tmp_path):
    first, second = run_ranks(housekeeping, 2, args=("stages=2", str(tmp_path)))
    for found in (first, second):
        assert found["epochs"] == [0, 1]  # rank 0 alone wanted to stop
        assert found["rate"] == pytest.approx(1e-3 / 2)
        assert found["seen"] == [0]  # rank 1 alone wanted to stop in the middle of the epoch
        assert found["later"] == pytest.approx(1e-4)  # rank 0 alone changed it
        assert found["frozen"] == {False}
        assert found["others"] == {True}
    assert "accuracy" in first["screen"]
    assert second["screen"] == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["board0", "logs0.csv"]
    assert (tmp_path / "board0").read_text().count("loss") == 2


@pytest.mark.parametrize(
    ("name", "plan"), [("residual", "stages=2"), ("blocks", "stages=2"), ("blocks", "spatial=2x1")]
)
def test_dropout_masks_do_not_depend_on_the_plan_also_inside_of_layers_that_run_whole(name, plan):
    alone, kept = dropped("data=1", name)
    for found, state in run_ranks(dropped, 2, args=(plan, name)):
        assert distance(found, alone) < 1e-9
        for a, b in zip(state, kept, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    assert alone["loss"][0] != alone["loss"][1]


def test_a_model_built_weightless_trains_with_its_own_stage_alone_and_can_be_gathered():
    history, _, predictions, wanted = without_weights(None)
    results = run_ranks(without_weights, 2, args=("stages=2",), deadline=120)
    for found, _, outputs, moments in results:
        assert distance(found, history) < 1e-6
        assert np.abs(outputs - predictions).max() < 1e-5
        assert max(np.abs(a - b).max() for a, b in zip(moments, wanted, strict=True)) < 1e-9
    assert all(0 < held < 0.9 for _, held, _, _ in results)
    assert sum(held for _, held, _, _ in results) < 1.01


def test_a_callback_that_reads_all_weights_is_refused_for_a_weightless_model(tmp_path):
    with sw.keras.weightless():
        model = compiled()
    sw.keras.distribute(model, "data=1")
    x, y = data(8)
    with pytest.raises(ValueError, match="gather"):
        model.fit(x, y, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(str(tmp_path / "a.keras"))])


def test_hypar_flow_strategy_cuts_where_it_is_told():
    plan, cuts = run_ranks(by_strategy, 2)[0]
    assert "stages=2" in plan
    assert [name.partition("_")[0] for name in cuts] == ["add"]


def test_strategies_are_plans():
    assert str(plan_of("hybrid", num_partitions=4, num_replicas=2)) == str(sw.Plan.parse("data=2 stages=4"))
    with pytest.raises(PlanError, match="hybrid"):
        plan_of("data", num_partitions=2)


def test_a_distributed_model_is_stock_again_when_told():
    model = compiled()
    stock = type(model).fit
    sw.keras.distribute(model, "data=1")
    assert "fit" in vars(model)
    sw.keras.undistribute(model)
    assert model.fit.__func__ is stock


def test_what_cannot_be_split_is_refused_with_its_name():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    start = keras.Input((20, 18, 3))
    end = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(5, 3)(start))
    model = sw.keras.distribute(Own(start, end), "data=1")
    model.compile(optimizer="sgd", loss="mse")
    x, _ = data(4)
    with pytest.raises(ValueError, match="train_step"):
        model.fit(x, np.zeros((4, 5)), verbose=0)
