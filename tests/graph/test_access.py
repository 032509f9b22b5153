"""What a layer's access says it reads is all that it reads.

Outside of the needed box every operand is filled with other numbers; the output box must not change.
"""

from __future__ import annotations

import random

import pytest
import torch
from graph_models import MODELS
from torch import Tensor, nn

from shardwise.geometry.access import needed
from shardwise.geometry.box import Box
from shardwise.graph import Graph, Kind, Layer, Source, capture, interpret

# Their statistics reach beyond the access, which describes only how elements correspond.
STATISTICS = {"layer_norm", "group_norm", "instance_norm"}


def boxes(shape: tuple[int, ...], generator: random.Random) -> list[Box]:
    result = []
    for _ in range(4):
        ends = [sorted(generator.sample(range(n + 1), 2)) for n in shape]
        result.append(Box(tuple(a for a, _ in ends), tuple(b for _, b in ends)))
    return result


def poisoned(tensor: Tensor, keep: Box) -> Tensor:
    other = torch.randn_like(tensor) * 7 if tensor.is_floating_point() else torch.zeros_like(tensor)
    other[keep.slices()] = tensor[keep.slices()]
    return other


def check_layer(layer: Layer, operands: list[Tensor], modules: dict[str, nn.Module], boxes: list[Box]) -> int:
    wanted = interpret.call(layer, operands, modules)
    for box in boxes:
        changed = [
            poisoned(tensor, needed(operand.access, operand.spec.shape, box))
            if operand.origin is not Source.BUFFER
            else tensor
            for operand, tensor in zip(layer.operands, operands, strict=True)
        ]
        found = interpret.call(layer, changed, modules)
        same = torch.allclose(found[box.slices()], wanted[box.slices()], rtol=1e-10, atol=1e-12)
        assert same, f"{layer.name} ({layer.op}) reads more than its access says for {box}"
    return len(boxes)


def check_graph(graph: Graph, model: nn.Module, inputs: list[Tensor]) -> int:
    generator = random.Random(0)
    state = interpret.state_of(model)
    modules = dict(model.named_modules())
    values = dict(zip((layer.name for layer in graph.inputs), inputs, strict=True))
    checked = 0
    for layer in graph:
        if layer.kind is Kind.INPUT:
            continue
        operands = [
            values[o.source] if o.origin is Source.VALUE else interpret.held(graph, state, o.source)
            for o in layer.operands
        ]
        values[layer.name] = interpret.call(layer, operands, modules)
        if layer.op not in STATISTICS and layer.op not in ("getitem", "rand") and len(layer.outputs) == 1:
            checked += check_layer(layer, operands, modules, boxes(layer.shape, generator))
    return checked


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_reads_more_than_its_access_says(name: str) -> None:
    case = MODELS[name]
    model = case.build().eval().double()
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in case.shapes]
    graph = capture(model, tuple(inputs), check=False)
    with torch.no_grad():
        assert check_graph(graph, model, inputs) >= 4
