"""The models and losses of the suite, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import zoo


def _like(out: Tensor) -> Tensor:
    return torch.randn_like(out)


def _classes(out: Tensor) -> Tensor:
    return torch.randint(0, out.shape[1], (out.shape[0], *out.shape[2:]))


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "mse": (F.mse_loss, _like),
    "ce": (F.cross_entropy, _classes),
}

MODELS: dict[str, Callable[..., nn.Module]] = {
    "zoo": lambda name, **settings: zoo.build(name, **settings),
    "resnet18": lambda **s: zoo.build("resnet18", **{"width": 4, "num_classes": 5, **s}),
    "unet": lambda **s: zoo.build("unet", **{"base": 4, "depth": 2, **s}),
}
