"""Kernels are stored as torch reads them, and mean what they meant."""

import keras
import torch
from keras_models import everything, residual

from shardwise.graph.keras.variables import named_variables
from shardwise.keras.layout import store_as_torch


def compiled(make):
    model = make()
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_kernels_and_the_optimizers_averages_need_no_copy():
    model = compiled(residual)
    entries = [entry for entry in named_variables(model) if len(entry.view.dims) == 4]
    assert any(not entry.view.apply(entry.variable.value).is_contiguous() for entry in entries)
    store_as_torch(model, named_variables(model))
    assert all(entry.view.apply(entry.variable.value).is_contiguous() for entry in entries)
    number = [v.path for v in model.trainable_variables].index(entries[0].variable.path)
    average = model.optimizer._momentums[number].value
    assert entries[0].view.apply(average).is_contiguous()


def values(model):
    return [variable.value.detach().clone() for variable in model.variables]


def test_values_shapes_and_predictions_stay():
    model = compiled(everything)
    x = torch.randn(2, *model.inputs[0].shape[1:])
    before, wanted = values(model), model(x)
    store_as_torch(model, named_variables(model))
    for found, known in zip(values(model), before, strict=True):
        assert torch.equal(found, known)
    torch.testing.assert_close(model(x), wanted)
