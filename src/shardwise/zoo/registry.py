"""Turn a model's name into its class, its settings and its usual input shape."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from .amoebanet import AmoebaNetD
from .cosmoflow import CosmoFlow
from .resnet import STAGES, ResNet
from .resnet_cifar import CifarResNet, blocks_per_stage
from .unet import UNet
from .vgg import VGG16

_NAMES = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet50v2"),
    *("resnet20", "resnet56", "resnet110", "resnet110v2", "resnet1001v2"),
    "vgg16",
    *("amoebanetd-18-208", "amoebanetd-18-214", "amoebanetd-18-256", "amoebanetd-18-416"),
    *("cosmoflow", "cosmoflow-256", "cosmoflow-512"),
    *("unet", "unet3d"),
)


@dataclass(frozen=True)
class Recipe:
    """Hold what a name stands for: a class, its settings, and the input shape without the batch."""

    model: type[nn.Module]
    settings: dict[str, Any]
    input_shape: tuple[int, ...]


def _resnet(depth: str, version: str | None) -> Recipe:
    settings = {"depth": int(depth), "version": 2 if version else 1}
    if settings["depth"] in STAGES:
        return Recipe(ResNet, settings, (3, 224, 224))
    blocks_per_stage(**settings)
    return Recipe(CifarResNet, settings, (3, 32, 32))


def _amoebanetd(layers: str, filters: str) -> Recipe:
    return Recipe(AmoebaNetD, {"num_layers": int(layers), "num_filters": int(filters)}, (3, 224, 224))


def _cosmoflow(size: str | None) -> Recipe:
    side = int(size) if size else 128
    return Recipe(CosmoFlow, {"input_size": side}, (4, side, side, side))


_FAMILIES: tuple[tuple[re.Pattern[str], Callable[..., Recipe]], ...] = (
    (re.compile(r"resnet(\d+)(v2)?"), _resnet),
    (re.compile(r"vgg16"), lambda: Recipe(VGG16, {}, (3, 224, 224))),
    (re.compile(r"amoebanetd-(\d+)-(\d+)"), _amoebanetd),
    (re.compile(r"cosmoflow(?:-(\d+))?"), _cosmoflow),
    (re.compile(r"unet"), lambda: Recipe(UNet, {}, (3, 512, 512))),
    (
        re.compile(r"unet3d"),
        lambda: Recipe(UNet, {"dims": 3, "num_classes": 3, "base": 32, "depth": 3}, (3, 128, 128, 128)),
    ),
)


def recipe(name: str) -> Recipe:
    """Return what a name stands for, or refuse it with the names there are and the closest one."""
    reason = "is not a model of the zoo"
    for pattern, make in _FAMILIES:
        match = pattern.fullmatch(name)
        if match:
            try:
                return make(*match.groups())
            except ValueError as error:
                reason = f"cannot be built ({error})"
    extended = [known for known in _NAMES if known.startswith(name) or name.startswith(known)]
    closest = get_close_matches(name, extended or _NAMES, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"model {name!r} {reason}; the closest is {closest!r}. Names are {', '.join(_NAMES)}, and likewise "
        "resnet<depth>, resnet<depth>v2, amoebanetd-<layers>-<filters> and cosmoflow-<size>"
    )


def names() -> tuple[str, ...]:
    """Return the canonical names; others such as "resnet164v2" or "amoebanetd-36-544" build as well."""
    return _NAMES


def input_shape(name: str) -> tuple[int, ...]:
    """Return the usual input shape of a model: channels and spatial sizes, without the batch."""
    return recipe(name).input_shape


def build(name: str, **overrides: Any) -> nn.Module:
    """Build a model by name.

    Args:
        name: one of `names()` or of their patterns.
        overrides: settings of the model's class, such as `num_classes=10`, `width=8` or `dropout=0.0`.

    Returns:
        The model in training mode, on the current default device (`with torch.device("meta")` works).
    """
    found = recipe(name)
    accepted = tuple(inspect.signature(found.model).parameters)
    for setting in overrides:
        if setting not in accepted:
            raise ValueError(f"model {name!r} has no setting {setting!r}; it has {', '.join(accepted)}")
    return found.model(**{**found.settings, **overrides})


def example(
    name: str,
    batch: int = 1,
    size: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw a random input for a model.

    Args:
        name: the model's name.
        batch: number of samples.
        size: spatial size, one number for all axes or one per axis; default as `input_shape(name)`.
        dtype: type of the numbers.
        device: where to put it; default is the current default device.
    """
    channels, *spatial = input_shape(name)
    if isinstance(size, int):
        spatial = [size] * len(spatial)
    elif size is not None:
        if len(size) != len(spatial):
            raise ValueError(f"size {tuple(size)} has {len(size)} axes; model {name!r} has {len(spatial)}")
        spatial = list(size)
    return torch.randn(batch, channels, *spatial, dtype=dtype, device=device)
