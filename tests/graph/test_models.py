"""Networks of many families are captured, reproduced, and reshaped without a new capture."""

from __future__ import annotations

import functools

import pytest
import torch
from graph_models import MODELS
from measuring import assert_same, measure, run
from torch import Tensor, nn

from shardwise.graph import Graph, Kind, capture


@functools.cache
def trained(name: str) -> tuple[nn.Module, list[Tensor], Graph]:
    case = MODELS[name]
    model = case.build()
    inputs = [torch.randn(shape) for shape in case.shapes]
    return model, inputs, capture(model, tuple(inputs))


CASES = pytest.mark.parametrize("name", MODELS)


@CASES
def test_graph_reproduces_the_model_at_its_own_and_two_other_sizes(name: str) -> None:
    case = MODELS[name]
    model = case.build().eval()
    graph = capture(model, tuple(torch.randn(shape) for shape in case.shapes))
    assert len(case.others) == 2
    for shapes in (case.shapes, *case.others):
        resized = graph.at(*shapes)
        inputs = [torch.randn(shape) for shape in shapes]
        assert resized.shapes == shapes
        with torch.no_grad():
            wanted = model(*inputs)
            assert_same(run(resized, model, inputs), wanted)
        for layer in resized:
            assert all(size > 0 for made in layer.outputs for size in made.shape), layer.name


@CASES
def test_most_of_the_work_lies_in_layers_of_known_kinds(name: str) -> None:
    _, _, graph = trained(name)
    assert graph.coverage().known_flops >= MODELS[name].known
    assert len({layer.name for layer in graph}) == len(graph)
    assert all(layer.reason for layer in graph if layer.kind is Kind.OTHER)


@pytest.mark.parametrize("name", [n for n, case in MODELS.items() if n not in ("vit", "deit", "window")])
def test_flops_and_saved_bytes_are_those_that_torch_counts(name: str) -> None:
    model, inputs, graph = trained(name)
    measured = measure(model, inputs)
    assert sum(layer.forward_flops for layer in graph) == measured.forward_flops
    backward = sum(layer.backward_flops for layer in graph)
    if any(layer.attributes.get("groups", 1) > 1 for layer in graph):
        # For grouped convolutions torch counts the weight's gradient as if every channel met every other.
        assert backward <= measured.backward_flops
        assert measured.forward_flops < backward <= 2 * measured.forward_flops
    else:
        assert backward == measured.backward_flops
    assert graph.saved_bytes == pytest.approx(measured.saved_bytes, rel=0.03)
    assert sum(spec.numel for spec in graph.parameters.values()) == sum(p.numel() for p in model.parameters())
