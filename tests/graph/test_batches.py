"""Graphs for other numbers of samples: derived where that is certain, equal to those that are followed."""

import copy
import pickle

import pytest
import torch
from torch import nn

from shardwise import zoo
from shardwise.graph import capture


def _followed(graph, batch):
    return graph.rebuild(tuple((batch, *shape[1:]) for shape in graph.shapes))


def _network():
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), *head)


@pytest.mark.parametrize("batch", [2, 3, 5, 8, 64, 1000])
@pytest.mark.parametrize("captured", [1, 4])
def test_derived_graphs_are_those_that_are_followed(captured, batch):
    graph = capture(_network(), torch.zeros(captured, 3, 17, 17), check=False)
    assert graph.batches is not None
    assert graph.batches.at(batch) == graph.with_batch(batch) == _followed(graph, batch)
    assert graph.with_batch(batch).with_batch(7) == _followed(graph, 7)


def test_networks_of_the_zoo_can_be_derived():
    with torch.device("meta"):
        model = zoo.build("resnet18")
    graph = capture(model, torch.zeros(2, 3, 64, 64, device="meta"), check=False)
    assert graph.batches is not None
    assert graph.batches.at(48) == _followed(graph, 48)


def test_two_other_numbers_are_followed_and_no_more(monkeypatch):
    graph = capture(_network(), torch.zeros(4, 3, 17, 17), check=False)
    follow, asked = graph.rebuild, []

    def counted(shapes):
        asked.append(shapes[0][0])
        return follow(shapes)

    counted.decides = False
    monkeypatch.setitem(graph.__dict__, "rebuild", counted)
    for batch in (16, 8, 32, 64, 2, 8, 5):
        assert graph.with_batch(batch).batch == batch
    assert asked == [16, 8]


class _Deciding(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[0] > 8 else x + 1


class _Folding(nn.Module):
    def forward(self, x):
        return x.reshape(x.shape[0] * x.shape[1], -1).relu()


class _Clamping(nn.Module):
    def forward(self, x):
        return x[:32] + 1


class _Splitting(nn.Module):
    def forward(self, x):
        return x.split(32)[0] * 2


class _Stepping(nn.Module):
    def forward(self, x):
        return x * (1 + x.shape[0] // 32)


@pytest.mark.parametrize("model", [_Clamping(), _Splitting(), _Stepping()])
def test_networks_that_change_only_beyond_the_example_are_followed(model):
    graph = capture(model, torch.zeros(4, 3, 6), check=False)
    assert graph.batches is None
    assert graph.with_batch(64) == _followed(graph, 64)
    assert graph.with_batch(64).layers != graph.with_batch(16).layers


class _Cropping(nn.Module):
    def forward(self, x):
        y = nn.functional.max_pool2d(x, 2)
        return x[:, :, 1:, 1:] + nn.functional.interpolate(y, size=x[:, :, 1:, 1:].shape[2:])


def test_parts_of_pixels_can_be_derived():
    graph = capture(_Cropping(), torch.zeros(4, 3, 6, 6), check=False)
    assert graph.batches is not None
    assert graph.batches.at(64) == _followed(graph, 64)


@pytest.mark.parametrize("model", [_Deciding(), _Folding()])
def test_networks_that_do_not_treat_all_numbers_alike_are_followed(model):
    graph = capture(model, torch.zeros(4, 3, 6), check=False)
    assert graph.batches is None
    assert graph.with_batch(5) == _followed(graph, 5)


def test_one_sample_is_always_followed():
    graph = capture(_network(), torch.zeros(4, 3, 17, 17), check=False)
    assert graph.batches is not None
    assert graph.with_batch(1) == _followed(graph, 1)


def test_a_graph_that_can_be_derived_is_copied_and_pickled():
    graph = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(4, 3, 17, 17), check=False)
    assert graph.batches is not None
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert len(other.layers) == len(graph.layers)
        assert other.with_batch(6).batch == 6
