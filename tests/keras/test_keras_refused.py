"""What a plan cannot do with a Keras model is said; what changes between fits is seen."""

import warnings

import keras
import numpy as np
import pytest
import torch
from keras import layers
from keras_workers import averaged, compiled, data, drawn

import shardwise as sw
from ranks import run_ranks


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


def test_all_ranks_draw_the_same_random_numbers():
    first, second = run_ranks(drawn, 2)
    assert first == second
