"""What a plan cannot do with a Keras model is said; what changes between fits is seen."""

import sys
import warnings

import keras
import numpy as np
import pytest
import torch
from keras import layers
from keras_workers import averaged, compiled, data, drawn, named

import shardwise as sw
from ranks import run_ranks
from shardwise.keras import Distribution
from shardwise.keras.refusals import refusal
from shardwise.training.auto import Auto


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Adds(layers.Layer):
    """A layer with a loss of its own."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return x


def small(*inside, shape=(6, 4)):
    start = x = keras.Input(shape)
    for layer in inside:
        x = layer(x)
    model = keras.Model(start, x)
    model.compile("sgd", "mse")
    return model


def test_outputs_that_carry_a_mask_are_refused():
    model = small(layers.Masking(0.0), layers.LSTM(3, return_sequences=True), layers.Dense(2))
    sw.keras.distribute(model, "data=1")
    with pytest.raises(ValueError, match="carry a mask"):
        model.fit(np.ones((2, 6, 4)), np.ones((2, 6, 2)), verbose=0)


def test_layers_that_add_losses_are_refused():
    model = small(layers.Dense(2), Adds(name="adds"))
    sw.keras.distribute(model, "data=1")
    with pytest.raises(ValueError, match=r"\['adds'\] call add_loss"):
        model.fit(np.ones((2, 6, 4)), np.ones((2, 6, 2)), verbose=0)


def test_averages_of_all_weights_are_refused_where_a_rank_has_some():
    assert all("use_ema" in text for text in run_ranks(averaged, 2))


def test_a_model_that_is_compiled_anew_trains_with_its_new_optimizer():
    model = compiled(optimizer=keras.optimizers.SGD(0.1))
    x, y = data(8)
    sw.keras.distribute(model, "data=1")
    model.fit(x, y, verbose=0)
    model.compile(keras.optimizers.SGD(0.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = [v.value.detach().clone() for v in model.trainable_variables]
    model.fit(x, y, verbose=0)
    assert all(torch.equal(v.value, old) for v, old in zip(model.trainable_variables, before, strict=True))
    assert int(model.optimizer.iterations.value) == 1


def choices(model, x, *, weighted=False):
    """Return what is said about plans when one is chosen for a model."""
    graph = sw.capture(model, torch.as_tensor(x), training=True, check=False)
    return lambda plan: refusal(model, graph, weighted, sw.Plan.parse(plan))


def test_auto_knows_what_the_optimizer_forbids():
    x, _ = data(4)
    ask = choices(compiled(optimizer=keras.optimizers.SGD(use_ema=True)), x)
    assert "use_ema" in ask("stages=2")
    assert "use_ema" in ask("filter=2")
    assert ask("data=2") == ask("spatial=2x1") == ""
    assert "clipnorm" in choices(compiled(optimizer=keras.optimizers.Adam(clipnorm=1.0)), x)("filter=2")


def test_auto_knows_what_losses_regularizers_and_layers_forbid():
    x, _ = data(4)
    ask = choices(compiled(), x)
    assert "batch norm" in ask("stages=2 micro_batches=2")
    assert ask("stages=2") == ask("filter=2") == ""
    orthogonal = keras.regularizers.OrthogonalRegularizer()
    ask = choices(
        small(layers.Dense(4, kernel_regularizer=orthogonal), shape=(4,)), np.ones((4, 4), "float32")
    )
    assert "regularizers" in ask("filter=2")
    assert ask("data=2") == ""
    model = small(layers.GaussianNoise(0.1), layers.Dense(2), shape=(4,))
    assert "random numbers" in choices(model, np.ones((4, 4), "float32"))("data=2")
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    ask = choices(model, np.ones((4, 4), "float32"), weighted=True)
    assert "mean_with_sample_weight" in ask("data=2")


def test_auto_asks_before_it_chooses(monkeypatch):
    said = {}

    def choose(graph, session, batch, *, optimizer_slots, refuse):
        said.update(slots=optimizer_slots, why=refuse(sw.Plan.parse("stages=2")))
        return Auto(sw.Plan())

    monkeypatch.setattr(sys.modules[Distribution.__module__], "auto_plan", choose)
    model = compiled(optimizer=keras.optimizers.Adam(use_ema=True))
    sw.keras.distribute(model)
    model.fit(*data(8), verbose=0)
    assert said["slots"] >= 2
    assert "use_ema" in said["why"]


def test_words_of_hypar_flow_without_a_strategy_are_refused():
    model = compiled()
    with pytest.raises(ValueError, match="strategy"):
        sw.fit(model, *data(8), num_partitions=2, verbose=0)


def test_dropouts_with_other_names_on_other_ranks_are_refused():
    assert all("clear_session" in text for text in run_ranks(named, 2))


def test_all_ranks_draw_the_same_random_numbers():
    first, second = run_ranks(drawn, 2)
    assert first == second
