"""Names build what they say, and wrong names are refused helpfully."""

import re
import time

import pytest
import torch
from torch import nn

from shardwise import zoo


@pytest.mark.parametrize("name", zoo.names())
def test_every_name_builds_on_meta(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    "name",
    ["resnet50", "resnet50v2", "resnet56", "vgg16", "amoebanetd-3-416", "cosmoflow", "cosmoflow-512", "unet"],
)
def test_a_model_answers_its_own_example_at_full_size(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    example = zoo.example(name, batch=2, device="meta")
    output = model(example)
    assert tuple(example.shape) == (2, *zoo.input_shape(name))
    assert output.shape[0] == 2
    assert output.is_meta


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet50", (3, 224, 224)),
        ("resnet50v2", (3, 224, 224)),
        ("resnet110v2", (3, 32, 32)),
        ("amoebanetd-18-416", (3, 224, 224)),
        ("cosmoflow", (4, 128, 128, 128)),
        ("cosmoflow-256", (4, 256, 256, 256)),
        ("unet", (3, 512, 512)),
        ("unet3d", (3, 128, 128, 128)),
    ],
)
def test_input_shapes_are_those_of_the_papers(name: str, shape: tuple[int, ...]) -> None:
    assert zoo.input_shape(name) == shape


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("resnet164v2", zoo.CifarResNet),
        ("resnet44", zoo.CifarResNet),
        ("resnet34v2", zoo.ResNet),
        ("amoebanetd-3-16", zoo.AmoebaNetD),
        ("cosmoflow-64", zoo.CosmoFlow),
    ],
)
def test_names_outside_the_list_parse_by_their_pattern(name: str, cls: type[nn.Module]) -> None:
    with torch.device("meta"):
        assert isinstance(zoo.build(name), cls)


@pytest.mark.parametrize(
    ("wrong", "closest"),
    [
        ("resnet-50", "resnet50"),
        ("vgg", "vgg16"),
        ("amoebanet-18-416", "amoebanetd-18-416"),
        ("unet2d", "unet"),
    ],
)
def test_an_unknown_name_is_refused_with_the_closest_and_all_names(wrong: str, closest: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(wrong))) as refusal:
        zoo.build(wrong)
    message = str(refusal.value)
    assert f"the closest is {closest!r}" in message
    assert all(name in message for name in zoo.names())


def test_an_impossible_depth_is_refused_with_the_rule_and_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"depth 6n \+ 2; found 1001, nearest is 998.*'resnet1001v2'"):
        zoo.build("resnet1001")
    with pytest.raises(ValueError, match=r"depth 9n \+ 2; found 111, nearest is 110"):
        zoo.input_shape("resnet111v2")


def test_an_unknown_setting_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'unet' has no setting 'widht'; it has dims, num_classes"):
        zoo.build("unet", widht=8)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("amoebanetd-18-208", {"num_layers": 4}, "num_layers is 4"),
        ("amoebanetd-18-4", {}, "num_filters is 4"),
        ("resnet50", {"version": 3}, "version is 3"),
        ("resnet50", {"depth": 51}, "depth is 51"),
        ("unet", {"dims": 4}, "dims is 4"),
        ("unet", {"up": "cubic"}, "up is 'cubic'"),
        ("unet", {"depth": 0}, "depth is 0"),
        ("cosmoflow", {"variant": "2018"}, "variant is '2018'"),
        ("cosmoflow", {"input_size": 0}, "leaves nothing after convolution 1"),
        ("cosmoflow", {"input_size": 65, "padded": False}, "leaves nothing after convolution 7"),
        ("cosmoflow", {"input_size": (16, 16)}, "has 2 axes"),
        ("cosmoflow", {"input_size": 4, "variant": "mlperf"}, "too small"),
        ("cosmoflow", {"variant": "lbann", "padded": False}, "padded=False"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(
    name: str, overrides: dict[str, object], message: str
) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=re.escape(message)):
        zoo.build(name, **overrides)


def test_example_takes_sizes_types_and_devices() -> None:
    assert zoo.example("unet", 3, size=(16, 24), dtype=torch.float64).shape == (3, 3, 16, 24)
    assert zoo.example("cosmoflow", size=16).shape == (1, 4, 16, 16, 16)
    assert zoo.example("resnet50", dtype=torch.float64).dtype == torch.float64
    assert zoo.example("cosmoflow-512", device="meta").is_meta
    with pytest.raises(ValueError, match=r"size \(16, 16\) has 2 axes; model 'cosmoflow' has 3"):
        zoo.example("cosmoflow", size=(16, 16))


def test_resnet1001v2_builds_in_seconds() -> None:
    start = time.perf_counter()
    model = zoo.build("resnet1001v2")
    # It takes about 1.5 s on an idle core; the rest is room for a loaded machine.
    assert time.perf_counter() - start < 15
    assert not any(parameter.is_meta for parameter in model.parameters())
