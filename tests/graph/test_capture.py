"""The contract of capture: what it leaves alone, what it names, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from measuring import assert_same, run
from torch import Tensor, nn

from shardwise.graph import CaptureError, Kind, Literal, SizeError, Source, TensorSpec, capture


def small() -> nn.Sequential:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def test_the_model_is_exactly_as_before() -> None:
    model = small()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    attributes = set(vars(model))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for training in (None, True, False):
        capture(model, torch.randn(2, 3, 8, 8, generator=torch.Generator()), training=training)
    assert torch.equal(torch.rand(3), expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert [m.training for m in model] == [True, False, *[True] * 5]
    assert set(vars(model)) == attributes


def test_a_failed_capture_leaves_the_buffers_alone() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return x if x.sum() > 0 else -x

    model = Fails()
    with pytest.raises(CaptureError):
        capture(model, torch.randn(2, 3, 4, 4))
    assert int(model.norm.num_batches_tracked) == 0
    assert torch.equal(model.norm.running_mean, torch.zeros(3))


def test_training_and_evaluation_are_captured_separately() -> None:
    model, x = small(), torch.randn(2, 3, 8, 8)
    training, evaluation = capture(model, x), capture(model, x, training=False)
    assert training["1"].attributes["batch_statistics"] is True
    assert training["3"].op == "dropout"
    assert training["3"].attributes == {"p": 0.3, "per": "element"}
    assert evaluation["1"].attributes["batch_statistics"] is False
    assert (evaluation["3"].op, evaluation["3"].kind) == ("identity", Kind.ELEMENTWISE)
    assert (training.training, evaluation.training) == (True, False)


def test_normalised_convolution_with_its_parameters() -> None:
    graph = capture(nn.Sequential(nn.Conv2d(4, 6, (3, 1), 2, "valid", groups=2)), torch.randn(1, 4, 9, 9))
    layer = graph["0"]
    assert layer.kind is Kind.CONVOLUTION
    assert layer.attributes["stride"] == (2, 2)
    assert layer.attributes["padding"] == ((0, 0), (0, 0))
    assert layer.attributes["groups"] == 2
    assert [o.role for o in layer.operands] == ["input", "weight", "bias"]
    assert layer.parameters == ("0.weight", "0.bias")
    assert layer.inputs == ("input",)
    assert layer.where.endswith(".py") is False


def test_same_padding_puts_the_odd_pixel_last() -> None:
    graph = capture(nn.Sequential(nn.Conv1d(1, 1, 4, padding="same", dilation=3)), torch.randn(1, 1, 20))
    assert graph["0"].attributes["padding"] == ((4, 5),)
    assert graph["0"].shape == (1, 1, 20)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, image: Tensor, scale: Tensor, *, flag: bool = False, extra: Any = None) -> Any:
        y = self.conv(image) * scale
        if extra is not None:
            y = y + extra["a"] + extra["b"][0]
        return OrderedDict(out=y, shape=tuple(y.shape), note="text", flag=flag, weight=self.conv.weight)


def test_inputs_by_name_nested_structures_and_constant_outputs() -> None:
    model = Named()
    x = torch.randn(2, 3, 4, 4)
    extra = {"a": torch.randn(4), "b": [torch.randn(1)]}
    graph = capture(model, {"scale": torch.randn(4), "image": x, "extra": extra, "flag": True})
    assert [layer.name for layer in graph.inputs] == ["image", "scale", "extra_0", "extra_1"]
    assert graph.outputs["shape"] == (2, 3, 4, 4)
    assert graph.outputs["note"] == Literal("text")
    assert graph.outputs["flag"] is True
    assert graph[graph.outputs["weight"]].parameters == ("conv.weight",)
    found = run(graph, model, [x, torch.ones(4), extra["a"], extra["b"][0]])
    assert_same(found["out"], model(x, torch.ones(4), extra=extra)["out"])
    assert found["note"] == "text"
    assert graph.at((3, 3, 4, 4), (4,), (4,), (1,)).outputs["shape"] == (3, 3, 4, 4)


def test_example_that_does_not_fit_names_the_signature() -> None:
    with pytest.raises(ValueError, match=r"does not fit.*image"):
        capture(Named(), {"picture": torch.randn(1, 3, 4, 4)})
    with pytest.raises(ValueError, match="no tensor"):
        capture(nn.Identity(), 3)


def test_shared_modules_tied_and_frozen_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.a.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(F.relu(self.a(x))))

    graph = capture(Tied(), torch.randn(2, 4))
    assert [layer.name for layer in graph][1:] == ["a", "relu", "a#2", "b"]
    assert graph.tied == {"b.weight": "a.weight"}
    assert graph["b"].parameters == ("a.weight", "b.bias")
    assert graph.frozen == {"a.bias"}
    assert set(graph.parameters) == {"a.weight", "a.bias", "b.bias"}


def test_in_place_calls_are_made_out_of_place_and_readers_rewired() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = y
            y += 1
            F.relu_(y)
            y.mul_(3).sub_(1)
            F.leaky_relu(y, 0.1, inplace=True)
            y.clamp_(max=2)
            y[:, 0] = 5
            return z + y

    graph = capture(InPlace(), torch.randn(2, 3))
    assert [layer.op for layer in graph][1:] == [
        "mul", "add", "relu", "mul", "sub", "leaky_relu", "clamp", "setitem", "add"
    ]  # fmt: skip
    assert graph.layers[-1].inputs == ("setitem", "setitem")


def test_sizes_that_are_counted_up_are_no_tensors() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            n = m = x.shape[1]
            n += 1
            n *= 2
            return F.pad(x, (0, n)).narrow(1, 0, m)

    graph = capture(Counts(), torch.randn(2, 3))
    assert graph["pad"].shape == (2, 11)
    assert graph["narrow"].shape == (2, 3)


def test_a_view_of_an_overwritten_tensor_is_never_read_wrongly() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            left = y[:, :1]
            y += 1
            return left + y

    model, x = Views(), torch.randn(2, 3)
    with pytest.raises(CaptureError, match="in place"):
        capture(model, x)


def test_scopes_lines_and_functions_in_names() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.relu()

    model = nn.Sequential(OrderedDict(stage=nn.Sequential(Block(), Block())))
    graph = capture(model, torch.randn(1, 2))
    assert [layer.name for layer in graph][1:] == [
        "stage.0.relu",
        "stage.0.add",
        "stage.1.relu",
        "stage.1.add",
    ]
    assert "test_capture.py:" in graph["stage.1.add"].where


def test_constants_are_kept_with_the_graph() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.tensor([1.0, 2.0])
            self.register_buffer("shift", torch.ones(2), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.shift + torch.tensor([3.0, 4.0])

    model = Constant()
    graph = capture(model, torch.randn(1, 2))
    sources = {o.source: o.origin for layer in graph for o in layer.operands if o.origin is not Source.VALUE}
    assert set(sources.values()) == {Source.BUFFER}
    assert "shift" in sources
    assert len(graph.constants) == 2
    assert set(sources) == set(graph.buffers)
    assert all(layer.kind is Kind.ELEMENTWISE for layer in graph.layers[1:])


def test_meta_models_and_specs_need_no_data() -> None:
    with torch.device("meta"):
        model = small()
    graph = capture(model, TensorSpec((4, 3, 4096, 4096)))
    assert graph["0"].shape == (4, 4, 4096, 4096)
    assert "self-check skipped" in graph.notes[0]
    real = capture(small(), TensorSpec((4, 3, 16, 16)))
    assert real.notes == ()
    assert graph.at((4, 3, 16, 16)).layers[-1].shape == real.layers[-1].shape


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if y.shape[-1] > 16:
            y = F.avg_pool2d(y, 2)
        return sum(part.mean() for part in y.split(4, dim=2))


def test_decisions_by_size_are_followed_and_guarded() -> None:
    model = Decides().eval()
    graph = capture(model, torch.randn(1, 3, 8, 8))
    assert "avg_pool2d" not in graph.by_name
    x = torch.randn(3, 3, 8, 12)
    assert_same(run(graph.at(x.shape), model, [x]), model(x))
    with pytest.raises(SizeError, match=r"test_capture.py:\d+.*depends on a size"):
        graph.at((1, 3, 8, 24))
    assert "avg_pool2d" in capture(model, torch.randn(1, 3, 24, 24)).by_name


def test_wrong_number_of_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="1 inputs, 2 shapes"):
        capture(small(), torch.randn(1, 3, 8, 8)).at((1, 3, 8, 8), (1,))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Branches())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 0:
            return x + 1
        return x - 1


def test_control_flow_by_data_is_refused_with_its_line_and_a_way_out() -> None:
    with pytest.raises(CaptureError) as refusal:
        capture(Deep(), torch.randn(2, 3))
    message = str(refusal.value)
    assert "test_capture.py:" in message
    assert "depends on the values of a tensor" in message
    assert "Data parallelism still works" in message


def test_the_self_check_refuses_what_the_trace_cannot_know() -> None:
    class Random(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(torch.rand(()))

    with pytest.raises(CaptureError, match="does not reproduce output 0"):
        capture(Random(), torch.randn(2, 3))


def test_modules_that_cannot_be_entered_stay_whole_with_a_reason() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            if type(x) is not torch.Tensor and type(x).__name__ != "FakeTensor":
                raise TypeError("tensors only")
            return self.linear(x), x.shape[0]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picky, self.big = Picky(), nn.Linear(3, 1000)

        def forward(self, x: Tensor) -> Tensor:
            y, n = self.picky(x)
            return self.big(y) / n

    model = Outer()
    graph = capture(model, torch.randn(2, 3))
    layer = graph["picky"]
    assert (layer.kind, layer.op) == (Kind.OTHER, "module")
    assert "tensors only" in layer.reason
    assert layer.parameters == ("picky.linear.weight", "picky.linear.bias")
    x = torch.randn(5, 3)
    assert_same(run(graph.at(x.shape), model, [x]), model(x))


def test_hooked_modules_are_entered_with_their_hooks() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    graph = capture(model, torch.randn(2, 3))
    assert [layer.name for layer in graph][1:] == ["0.linear", "0.mul", "1"]


def test_graphs_can_be_pickled_with_their_rebuilding() -> None:
    graph = capture(small(), torch.randn(2, 3, 8, 8))
    again = pickle.loads(pickle.dumps(graph))
    assert [layer.name for layer in again] == [layer.name for layer in graph]
    assert again.at((1, 3, 16, 16)).layers == graph.at((1, 3, 16, 16)).layers


def test_graphs_for_the_same_shapes_are_made_once() -> None:
    graph = capture(small(), torch.randn(2, 3, 8, 8))
    assert graph.at((2, 3, 8, 8)) is graph
    assert graph.at((1, 3, 9, 9)) is graph.at((1, 3, 9, 9))
