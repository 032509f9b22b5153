"""A captured Keras model computes what Keras computes: outputs, gradients and moving averages."""

from __future__ import annotations

import subprocess
import sys

import keras
import pytest
import torch
from keras_models import (
    MODELS,
    as_called,
    blocks,
    double_precision,
    everything,
    own_layers,
    random_inputs,
    residual,
    sequence,
    told,
    unpredictable,
)

import shardwise as sw
from shardwise.graph import Kind, interpret
from shardwise.graph.keras import wrap
from shardwise.graph.keras.check import _undropped
from shardwise.graph.keras.module import without_dropout
from shardwise.graph.trace import leaves


def compare(model, shapes, training):
    """Return the largest relative difference of outputs, gradients and buffers, and the graph."""
    module = wrap(model)
    inputs = random_inputs(shapes)
    graph = module.capture(as_called(model, inputs), training=training, check=True)
    plain = sw.Graph(**{**vars_of(graph), "layers": tuple(map(_undropped, graph.layers))})
    start = {name: buffer.clone() for name, buffer in module.named_buffers()}
    found = leaves(interpret.run(plain, inputs, interpret.state_of(module)))
    probe(found).backward()
    after = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for name, buffer in module.named_buffers():
        buffer.copy_(start[name])
    with without_dropout(model):
        wanted = leaves(module(*inputs))
    probe(wanted).backward()
    pairs = list(zip(found, wanted, strict=True))
    for entry in module.variables:
        if entry.is_trained:
            parameter = dict(module.named_parameters())[entry.name]
            pairs.append((parameter.grad, entry.view.apply(entry.variable.value.grad)))
        elif entry.variable.value.is_floating_point():
            pairs.append((after[entry.name], entry.variable.value))
    largest = max(float(b.detach().abs().max()) for _, b in pairs)
    # Gradients before a batch norm may be zero but for rounding: those count against the largest of all.
    scales = [max(float(b.detach().abs().max()), 1e-6 * largest) for _, b in pairs]
    worst = max(
        float((a - b).detach().abs().max()) / scale for (a, b), scale in zip(pairs, scales, strict=True)
    )
    return worst, graph


def probe(outputs):
    """Return a number that depends on every output in its own way."""
    weights = (torch.arange(t.numel(), dtype=t.dtype).sin().view(t.shape) for t in outputs)
    return torch.stack([(t.square() + w * t).sum() for t, w in zip(outputs, weights, strict=True)]).sum()


def vars_of(graph):
    return {name: getattr(graph, name) for name in graph.__dataclass_fields__}


# Keras says so of every model that gets a masked tensor; the tensor keeps its mask.
@pytest.mark.filterwarnings("ignore:.*does not support masking:UserWarning")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_graph_equals_keras_in_outputs_gradients_and_averages(name, training):
    make, shapes = MODELS[name]
    with double_precision():
        keras.utils.set_random_seed(1)
        worst, graph = compare(make(), shapes, training)
    assert worst < 1e-9
    assert graph.source == ("export" if name == "on_tensors" else "keras")
    assert graph.training == training


def test_all_usual_image_layers_have_rules():
    keras.utils.set_random_seed(1)
    graph = sw.capture(everything(), torch.randn(2, 17, 19, 3), training=True)
    assert [layer.name for layer in graph if layer.kind is Kind.OTHER] == []


def test_a_layer_without_a_rule_runs_whole_and_says_why():
    graph = sw.capture(own_layers(), torch.randn(2, 8, 8, 3))
    opaque = [layer for layer in graph if layer.kind is Kind.OTHER]
    assert len(opaque) == 1
    assert "sort" in opaque[0].reason.lower() or "sort" in opaque[0].name.lower()


def test_a_model_that_cannot_be_entered_is_one_layer_and_says_why():
    graph = sw.capture(unpredictable(), torch.randn(2, 8, 8, 3), training=True)
    (layer,) = [layer for layer in graph if layer.kind is not Kind.INPUT]
    assert layer.kind is Kind.OTHER
    assert "symbols" in layer.reason
    assert "torch.export" in layer.reason


def test_layers_that_are_told_how_to_behave_do_so():
    graph = sw.capture(told(), torch.randn(4, 8, 8, 3), training=True)
    norms = [layer.attributes["batch_statistics"] for layer in graph if layer.op == "batch_norm"]
    assert norms == [False, False, True]
    assert not any(layer.kind is Kind.DROPOUT for layer in graph)


def test_an_own_layer_with_batch_norm_and_dropout_is_entered_or_named_by_coverage():
    graph = sw.capture(blocks(0.5), torch.randn(4, 8, 8, 3), training=True)
    assert [layer.op for layer in graph if layer.op == "batch_norm"] == ["batch_norm"]
    assert [layer.name for layer in graph if layer.kind is Kind.DROPOUT] != []
    (opaque,) = [layer for layer in graph if layer.kind is Kind.OTHER]
    assert "closed" in opaque.name
    assert opaque.name in str(graph.coverage())


class Negated(keras.layers.Layer):
    """Uses its variable outside of Keras's graph when it is called on symbols."""

    def build(self, shape):
        self.alpha = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * (-self.alpha)


def test_a_variable_that_a_symbolic_call_would_freeze_makes_its_layer_opaque():
    start = keras.Input((4,))
    graph = sw.capture(keras.Model(start, Negated()(start)), torch.randn(2, 4))
    (layer,) = [layer for layer in graph if layer.kind is Kind.OTHER]
    assert len(layer.parameters) == 1
    assert "alpha" in layer.reason or "variable" in layer.reason


def test_a_recurrent_layer_is_one_opaque_call_with_its_weights():
    graph = sw.capture(sequence(), torch.randn(2, 16, 4))
    (layer,) = [layer for layer in graph if layer.kind is Kind.OTHER]
    assert len(layer.parameters) == 3


def test_graph_serves_other_batch_sizes_and_image_sizes():
    x = start = keras.Input((None, None, 3))
    x = keras.layers.Conv2D(4, 3, strides=2, padding="same")(x)
    model = keras.Model(start, keras.layers.GlobalAveragePooling2D()(x))
    graph = sw.capture(model, torch.randn(2, 9, 9, 3))
    for shape in [(5, 9, 9, 3), (1, 12, 7, 3)]:
        other = graph.at(shape)
        data = torch.randn(shape)
        found = interpret.run(other, [data], interpret.state_of(wrap(model)))
        torch.testing.assert_close(found, model(data), rtol=1e-4, atol=1e-5)


def test_parameters_share_memory_with_keras_and_carry_its_paths():
    model = residual()
    module = wrap(model)
    kernel = model.layers[1].kernel
    parameter = dict(module.named_parameters())[kernel.path]
    with torch.no_grad():
        parameter[0, 1].fill_(7.0)
    assert float(kernel.value.detach()[..., 1, 0].min()) == 7.0
    assert set(module.names.values()) == {v.path for v in model.variables}


def test_frozen_layers_are_frozen_and_their_batch_norm_keeps_its_averages():
    model = residual()
    model.layers[1].trainable = False
    model.layers[2].trainable = False
    graph = sw.capture(model, torch.randn(2, 20, 18, 3), training=True)
    assert model.layers[1].kernel.path in graph.frozen
    norm = next(layer for layer in graph if layer.op == "batch_norm")
    assert norm.attributes["batch_statistics"] is False


def test_wrong_inputs_are_named():
    make, _ = MODELS["several"]
    with pytest.raises(sw.graph.CaptureError, match="'right'"):
        sw.capture(make(), {"left": torch.randn(2, 8, 8, 3)})


def test_shardwise_never_imports_keras_by_itself():
    code = "import sys, shardwise as sw; sw.capture, sw.fit, sw.Trainer; sys.exit('keras' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
