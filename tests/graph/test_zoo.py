"""The layer tables of the reference models: flops, parameters, saved bytes, time to capture."""

from __future__ import annotations

import time

import pytest
import torch
from measuring import assert_same, measure, run
from torch import nn

from shardwise import zoo
from shardwise.graph import Kind, TensorSpec, capture

SMALL = {
    "resnet50": (1, 3, 64, 64),
    "resnet50v2": (1, 3, 64, 64),
    "resnet110v2": (1, 3, 32, 32),
    "vgg16": (1, 3, 224, 224),
    "amoebanetd-3-16": (2, 3, 64, 64),
    "amoebanetd-18-208": (2, 3, 64, 64),
    "cosmoflow": (1, 4, 128, 128, 128),
    "unet": (1, 3, 64, 64),
    "unet3d": (1, 3, 16, 16, 16),
}
HEAVY = ("vgg16", "cosmoflow", "amoebanetd-18-208")


@pytest.mark.parametrize("name", [n for n in SMALL if n not in HEAVY])
def test_table_agrees_with_what_torch_counts(name: str) -> None:
    model = zoo.build(name)
    inputs = [torch.randn(SMALL[name])]
    graph = capture(model, inputs[0])
    measured = measure(model, inputs)
    assert sum(layer.forward_flops for layer in graph) == measured.forward_flops
    assert sum(layer.backward_flops for layer in graph) == measured.backward_flops
    assert graph.saved_bytes == pytest.approx(measured.saved_bytes, rel=0.03)
    assert graph.coverage().known_flops == 1.0
    assert graph.coverage().opaque == ()
    assert sum(spec.numel for spec in graph.parameters.values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.full
@pytest.mark.parametrize("name", HEAVY)
def test_table_of_heavy_models_agrees_with_what_torch_counts(name: str) -> None:
    test_table_agrees_with_what_torch_counts(name)


@pytest.mark.parametrize("name", ["resnet50", "unet"])
def test_evaluation_is_reproduced_at_another_size(name: str) -> None:
    model = zoo.build(name).eval()
    shape = SMALL[name]
    graph = capture(model, TensorSpec(shape), check=False)
    other = (2, *shape[1:-1], shape[-1] + 32)
    x = torch.randn(other)
    with torch.no_grad():
        assert_same(run(graph.at(other), model, [x]), model(x))


DEFAULT = ("resnet50", "vgg16", "amoebanetd-18-416", "cosmoflow-512", "unet", "unet3d", "resnet1001v2")
OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in zoo.names() if name not in DEFAULT]


@pytest.mark.parametrize("name", [*DEFAULT, *OTHERS])
def test_every_model_is_captured_at_full_size_without_memory(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    graph = capture(model, torch.empty(1, *zoo.input_shape(name), device="meta"))
    assert graph.source == "fx"
    assert graph.coverage().known_flops == 1.0
    assert any("self-check skipped" in note for note in graph.notes)
    eight = graph.with_batch(8)
    assert eight.layers[-1].shape[0] == 8
    assert sum(layer.forward_flops for layer in eight) == 8 * sum(layer.forward_flops for layer in graph)


# Counting the deep ones takes seconds each, and the shallow ones of their families are counted here.
DEEP = ("resnet101", "resnet152", "resnet110", "resnet110v2", "resnet1001v2")
COUNTED = [
    pytest.param(n, marks=pytest.mark.full) if n in DEEP or n.startswith("amoebanetd") else n
    for n in zoo.names()
]


@pytest.mark.parametrize("name", COUNTED)
def test_table_at_full_size_is_what_torch_counts(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    x = torch.empty(2, *zoo.input_shape(name), device="meta")
    graph, measured = capture(model, x), measure(model, [x])
    assert sum(layer.forward_flops for layer in graph) == measured.forward_flops
    assert sum(layer.backward_flops for layer in graph) == measured.backward_flops
    assert graph.saved_bytes == measured.saved_bytes
    assert sum(spec.numel for spec in graph.parameters.values()) == sum(p.numel() for p in model.parameters())


def test_resnet1001_is_captured_by_fx_in_seconds() -> None:
    model: nn.Module = zoo.build("resnet1001v2")
    start = time.process_time()
    graph = capture(model, torch.randn(1, 3, 32, 32))
    assert time.process_time() - start < 10
    assert graph.source == "fx"
    assert sum(layer.kind is Kind.CONVOLUTION for layer in graph) > 1000
