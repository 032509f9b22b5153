"""The models and losses of the suite, by name, so that every rank can build the same ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import zoo
from transparency.random_cnn import RandomCNN
from transparency.small_models import SMALL


def _classes(out: Tensor) -> Tensor:
    return torch.randint(0, out.shape[1], (out.shape[0], *out.shape[2:]))


Loss = Callable[..., Tensor]
LOSSES: dict[str, tuple[Loss, Callable[[Tensor], Tensor]]] = {
    "mse": (F.mse_loss, torch.randn_like),
    "ce": (F.cross_entropy, _classes),
}

# Narrow and small, but with every layer that the real ones have. Two sizes each: even and odd.
ZOO: dict[str, tuple[dict[str, object], tuple[tuple[int, ...], ...], str]] = {
    "resnet18": ({"width": 4, "num_classes": 5}, ((4, 3, 64, 48), (4, 3, 97, 131)), "ce"),
    "resnet34": ({"width": 4, "num_classes": 5}, ((4, 3, 64, 48), (4, 3, 65, 49)), "ce"),
    "resnet50": ({"width": 4, "num_classes": 5}, ((4, 3, 64, 48), (4, 3, 67, 51)), "ce"),
    "resnet101": ({"width": 4, "num_classes": 5}, ((4, 3, 64, 48), (4, 3, 65, 49)), "ce"),
    "resnet152": ({"width": 4, "num_classes": 5}, ((4, 3, 64, 48), (4, 3, 65, 49)), "ce"),
    "resnet50v2": ({"width": 4, "num_classes": 5}, ((4, 3, 64, 48), (4, 3, 65, 49)), "ce"),
    "resnet20": ({"width": 4, "num_classes": 5}, ((4, 3, 32, 32), (4, 3, 31, 37)), "ce"),
    "resnet56": ({"width": 4, "num_classes": 5}, ((4, 3, 24, 24), (4, 3, 21, 27)), "ce"),
    "resnet110": ({"width": 4, "num_classes": 5}, ((4, 3, 24, 24), (4, 3, 21, 27)), "ce"),
    "resnet110v2": ({"width": 4, "num_classes": 5}, ((4, 3, 24, 24), (4, 3, 21, 27)), "ce"),
    "resnet1001v2": ({"width": 2, "num_classes": 5}, ((4, 3, 16, 16), (4, 3, 17, 19)), "ce"),
    "vgg16": (
        {"width": 4, "num_classes": 5, "hidden": 16, "pooled": 2, "dropout": 0.0},
        ((2, 3, 64, 96), (2, 3, 67, 101)),
        "ce",
    ),
    "amoebanetd-3-16": ({"num_classes": 5}, ((4, 3, 64, 96), (4, 3, 65, 97)), "ce"),
    "cosmoflow-32": (
        {"width": 4, "hidden": (8, 8), "dropout": 0.0},
        ((2, 4, 32, 32, 32), (2, 4, 32, 32, 32)),
        "mse",
    ),
    "unet": ({"base": 4, "depth": 2}, ((2, 3, 32, 48), (2, 3, 36, 52)), "ce"),
    "unet3d": ({"base": 4, "depth": 1}, ((2, 3, 8, 12, 16), (2, 3, 10, 14, 18)), "ce"),
}

# Every fifth random network is one for volumes.
RANDOM_SIZES = {2: ((32, 24), (29, 23)), 3: ((16, 12, 10), (15, 11, 13))}


def random_dims(seed: int) -> int:
    """Return how many spatial dimensions a random network has."""
    return 3 if seed % 5 == 4 else 2


def calm(model: nn.Module) -> nn.Module:
    """Let batch norms amplify nothing, so that rounding stays rounding through a thousand layers.

    As they are made, narrow and untrained on small images, deep networks turn a change in the last bit of
    the input into one of a per mille: nobody could tell then whether a plan is exact.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
            module.eps = 1.0
            nn.init.constant_(module.weight, 0.5)
    return model


def _zoo(name: str) -> Callable[..., nn.Module]:
    return lambda **settings: calm(zoo.build(name, **{**ZOO[name][0], **settings}))


MODELS: dict[str, Callable[..., nn.Module]] = {name: _zoo(name) for name in ZOO}
MODELS["random"] = RandomCNN
MODELS |= SMALL
