"""The second tracer gives the same graphs as the first, and enters what the first cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_models import MODELS
from measuring import assert_same, run
from torch import Tensor, nn

from shardwise.graph import Graph, SizeError, capture
from shardwise.graph.capture import build, untouched
from shardwise.graph.example import read_example
from shardwise.graph.trace_export import trace_export


def exported(model: nn.Module, example: Any) -> Graph:
    with untouched(model):
        return build(trace_export(model, read_example(model.forward, example)))


def kinds(graph: Graph) -> dict[str, int]:
    counts: dict[str, int] = {}
    for layer in graph:
        if layer.op not in ("slice", "reshape", "permute", "identity", "to", "clone", "contiguous", "expand"):
            counts[layer.op] = counts.get(layer.op, 0) + 1
    return counts


SLOW = [pytest.param(name, marks=pytest.mark.full) for name in ("unet_bilinear", "style")]


@pytest.mark.parametrize("name", ["resnet", "senet", "mobilenet_v3", "vnet", "c3d", *SLOW])
def test_both_tracers_find_the_same_layers(name: str) -> None:
    case = MODELS[name]
    model = case.build()
    inputs = tuple(torch.randn(shape) for shape in case.shapes)
    first, second = capture(model, inputs), exported(model, inputs)
    assert (first.source, second.source) == ("fx", "export")
    assert kinds(first) == kinds(second)
    assert set(first.parameters) == set(second.parameters)
    assert set(first.buffers) == set(second.buffers)
    assert sum(layer.forward_flops for layer in first) == sum(layer.forward_flops for layer in second)
    model.eval()
    shapes = case.others[0]
    resized = exported(model, inputs).at(*shapes)
    others = [torch.randn(shape) for shape in shapes]
    with torch.no_grad():
        assert_same(run(resized, model, others), model(*others))


class Typed(nn.Module):
    """Looks at the type of its input, which is something else while fx traces."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError("tensors only")
        return F.relu(self.norm(self.conv(x)))


def test_a_model_that_fx_cannot_follow_is_exported_with_its_names() -> None:
    model = nn.Sequential(Typed(), nn.Conv2d(8, 2, 1))
    graph = capture(model, torch.randn(1, 3, 8, 8))
    assert graph.source == "export"
    assert [layer.name for layer in graph][1:] == ["0.conv", "0.norm", "0.relu", "1"]
    assert graph["0.norm"].buffers == (
        "0.norm.running_mean",
        "0.norm.running_var",
        "0.norm.num_batches_tracked",
    )
    assert "test_export.py:" in graph["0.relu"].where
    assert graph.with_batch(4)["1"].shape == (4, 2, 8, 8)


def test_sizes_that_export_fixed_are_refused_by_name() -> None:
    graph = exported(Typed(), torch.randn(2, 3, 8, 8))
    with pytest.raises(SizeError, match=r"x\.shape\[1\] == 3"):
        graph.at((2, 4, 8, 8))
