"""Tables and coverage say what is there."""

from __future__ import annotations

import re

import torch
from graph_models import MODELS
from torch import nn

from shardwise.graph import Graph, capture


class Sorted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x, -1)[0]


def graph_of(name: str) -> Graph:
    case = MODELS[name]
    return capture(case.build(), tuple(torch.randn(shape) for shape in case.shapes))


def test_table_shows_geometry_and_totals() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))
    text = capture(model, torch.randn(1, 4, 8, 8)).table()
    lines = text.splitlines()
    columns = ("layer", "kind", "op", "geometry", "output", "parameters", "flops", "backward", "saved bytes")
    assert " ".join(lines[0].split()) == " ".join(columns)
    conv = next(line for line in lines if line.startswith("0 "))
    assert "k3 s2 p1 g2" in conv
    assert "1x8x4x4" in conv
    assert "convolution" in conv
    assert "1.44 k parameters" in text
    assert "100.0% of the flops in layers of known kinds, 0 opaque layers" in text


def test_shared_parameters_are_counted_once_in_the_table() -> None:
    layer = nn.Linear(10, 10, bias=False)
    text = capture(nn.Sequential(layer, layer), torch.randn(1, 10)).table()
    rows = [line.split() for line in text.splitlines() if line.startswith("0")]
    assert rows[0][4] == "100"
    assert rows[1][0] == "0#2"
    assert "100 parameters" in text


def test_coverage_names_the_possible_splits() -> None:
    by_name = {layer.name: layer for layer in graph_of("resnet").coverage().layers}
    assert by_name["0.0"].splits == {"tile", "batch", "filter", "channel"}
    assert by_name["0.1"].splits == {"tile", "batch", "filter"}
    assert by_name["4.adaptive_avg_pool2d"].splits == {"tile", "batch", "filter"}
    assert by_name["4.fc"].splits == {"batch", "filter", "channel"}
    grouped = {layer.name: layer for layer in graph_of("resnext").coverage().layers}
    assert grouped["1.conv2"].splits == {"tile", "batch", "filter"}


def test_coverage_says_why_transformers_have_no_tiles() -> None:
    coverage = graph_of("deit").coverage()
    (attention,) = coverage.opaque
    layer = next(layer for layer in coverage.layers if layer.name == attention)
    assert layer.reason == "every position reads every other"
    assert "tile" not in layer.splits
    assert "batch" in layer.splits
    assert coverage.share("batch") == 1.0
    text = str(coverage)
    assert "every position reads every other" in text
    assert re.search(r"tiles are gathered for \d+ layers", text)
    assert "1 opaque layers" in text


def test_coverage_tells_what_a_layer_in_the_middle_of_tiles_costs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Sorted(), nn.Conv2d(8, 8, 3, padding=1))
    coverage = capture(model, torch.randn(2, 3, 32, 32)).coverage()
    cost = {layer.name: layer.gathered_bytes for layer in coverage.layers if layer.gathered_bytes}
    assert list(cost.values()) == [2 * 8 * 32 * 32 * 4]
    assert "64 kB" in str(coverage)


def test_opaque_layers_are_counted_and_explained() -> None:
    text = graph_of("segnet").table()
    assert "4 opaque layers" in text
    reasons = [layer.reason for layer in graph_of("segnet").coverage().layers if layer.kind.value == "other"]
    assert any("indices" in reason for reason in reasons)
