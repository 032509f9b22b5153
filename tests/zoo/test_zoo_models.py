"""Small versions of every family compute, differentiate and trace."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from shardwise import zoo

TINY: dict[str, tuple[str, dict[str, Any], int | tuple[int, ...]]] = {
    "resnet-basic": ("resnet18", {"width": 4, "num_classes": 5}, 48),
    "resnet-bottleneck": ("resnet50", {"width": 4, "num_classes": 5}, (48, 40)),
    "resnet-v2-basic": ("resnet18v2", {"width": 4, "num_classes": 5}, 48),
    "resnet-v2-bottleneck": ("resnet50v2", {"width": 4, "num_classes": 5}, 48),
    "cifar-v1": ("resnet20", {"width": 4, "num_classes": 5}, 17),
    "cifar-v2": ("resnet20v2", {"width": 4, "num_classes": 5}, (16, 19)),
    "vgg": ("vgg16", {"width": 4, "hidden": 8, "pooled": 2, "num_classes": 5}, 64),
    "amoebanet": ("amoebanetd-3-16", {"num_classes": 5}, 64),
    "amoebanet-odd": ("amoebanetd-3-16", {"num_classes": 5}, (45, 67)),
    "cosmoflow-paradl": ("cosmoflow", {"input_size": 16, "width": 2, "hidden": (8, 8), "num_outputs": 5}, 16),
    "cosmoflow-unpadded": (
        "cosmoflow",
        {"input_size": 66, "width": 1, "hidden": (8, 8), "num_outputs": 5, "padded": False},
        66,
    ),
    "cosmoflow-lbann": (
        "cosmoflow",
        {"input_size": (24, 16, 17), "variant": "lbann", "width": 2, "hidden": (8, 8), "num_outputs": 5},
        (24, 16, 17),
    ),
    "cosmoflow-mlperf": (
        "cosmoflow",
        {"input_size": 16, "variant": "mlperf", "width": 2, "num_outputs": 5, "batch_norm": True},
        16,
    ),
    "unet": ("unet", {"base": 4, "depth": 2, "num_classes": 5}, (16, 24)),
    "unet-plain-linear": (
        "unet",
        {"base": 4, "depth": 2, "num_classes": 5, "batch_norm": False, "up": "linear"},
        16,
    ),
    "unet3d": ("unet3d", {"base": 2, "depth": 2, "num_classes": 5}, (8, 12, 16)),
    "unet3d-linear": ("unet3d", {"base": 2, "depth": 1, "num_classes": 5, "up": "linear"}, 8),
}


@pytest.fixture(autouse=True)
def _one_seeded_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def tiny(key: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    name, overrides, size = TINY[key]
    return zoo.build(name, **overrides).to(dtype), zoo.example(name, batch=2, size=size, dtype=dtype)


@pytest.mark.parametrize("key", TINY)
def test_output_has_one_value_per_class(key: str) -> None:
    model, x = tiny(key)
    y = model(x)
    assert y.shape == ((2, 5, *x.shape[2:]) if "unet" in key else (2, 5))
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("key", TINY)
def test_every_parameter_gets_a_finite_gradient(key: str) -> None:
    model, x = tiny(key)
    model(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert any(parameter.grad.abs().max() > 0 for parameter in model.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("key", TINY)
def test_symbolic_trace_computes_the_same(key: str) -> None:
    model, x = tiny(key, torch.float64)
    model.eval()
    traced = fx.symbolic_trace(copy.deepcopy(model))
    with torch.no_grad():
        assert torch.equal(traced(x), model(x))
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert len(called) == len(set(called)), "a module called twice cannot be told apart by its name"


def test_training_and_evaluation_differ_only_by_dropout_without_normalisation() -> None:
    model, x = tiny("vgg")
    assert not torch.equal(model(x), model(x))
    plain = zoo.build("vgg16", width=4, hidden=8, pooled=2, dropout=0.0)
    assert torch.equal(plain(x), plain.eval()(x))


def test_a_deep_network_starts_with_bounded_activations() -> None:
    model = zoo.build("resnet110v2")
    with torch.no_grad():
        y = model(zoo.example("resnet110v2", batch=4))
    assert 0.01 < y.std() < 10


def test_resnet_keys_are_those_of_torchvision() -> None:
    with torch.device("meta"):
        keys = zoo.build("resnet50").state_dict().keys()
    expected = {
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.conv3.weight",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.bias",
        "layer4.2.bn3.num_batches_tracked",
        "fc.bias",
    }
    assert expected <= keys
    assert len(keys) == 320


def test_cosmoflow_at_512_has_the_feature_maps_of_paradls_table() -> None:
    sides = []
    with torch.device("meta"):
        model = zoo.build("cosmoflow-512", padded=False)
        for module in model.modules():
            if isinstance(module, nn.Conv3d):
                module.register_forward_hook(lambda _, __, output: sides.append(output.shape[-1]))
        model(zoo.example("cosmoflow-512"))
    assert sides == [510, 253, 62, 29, 13, 5, 1]


def test_cosmoflow_of_lbann_ends_in_two_voxels_a_side() -> None:
    with torch.device("meta"):
        for size in (16, 128, 256, 512):
            model = zoo.build("cosmoflow", input_size=size, variant="lbann")
            assert model.get_submodule("features")(zoo.example("cosmoflow", size=size)).shape[2:] == (2, 2, 2)


def test_factorized_reduce_reads_even_and_odd_pixels() -> None:
    from shardwise.zoo.amoebanet import FactorizedReduce

    layer = FactorizedReduce(1, 2).eval()
    for parameter in (layer.conv1.weight, layer.conv2.weight):
        nn.init.ones_(parameter)
    x = torch.arange(1.0, 26.0).reshape(1, 1, 5, 5)
    even, odd = layer(x).detach()[0] * (1 + layer.bn.eps) ** 0.5
    torch.testing.assert_close(even, x[0, 0, ::2, ::2])
    # The last row and column of the shifted image lie outside and read zeros.
    torch.testing.assert_close(odd, nn.functional.pad(x[0, 0, 1::2, 1::2], (0, 1, 0, 1)))
