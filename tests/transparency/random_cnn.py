"""Random convolutional networks: the same seed gives the same network on every rank."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CONV = {2: nn.Conv2d, 3: nn.Conv3d}
_UNCONV = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_MAX = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
_AVG = {2: nn.AvgPool2d, 3: nn.AvgPool3d}
_BATCH_NORM = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE_NORM = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
_SMALLEST, _LARGEST = 4, 80
# Layers that are left when those that nothing reads are gone.
_LEAST = 9


class SqueezeExcite(nn.Module):
    """Scale channels by what their means say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, 2), nn.Linear(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.up(F.relu(self.down(x.flatten(2).mean(2)))))
        return x * gate.reshape(gate.shape[0], gate.shape[1], *(1,) * (x.ndim - 2))


class Crop(nn.Module):
    """Cut a border off, uneven on purpose."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, 1:, :-1]


class RandomCNN(nn.Module):
    """A random graph of layers: each reads one or two of the values so far.

    Args:
        seed: which network.
        size: spatial size that it is built for; others work too.
        dims: 2 or 3.
        depth: number of layers.
        dense: end in an image instead of a vector.
    """

    def __init__(self, seed: int, size: tuple[int, ...], depth: int = 14, channels: int = 3) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.dims = len(size)
        self.steps: list[tuple[str, int, int]] = []
        self.layers = nn.ModuleList()
        values = [torch.zeros(2, channels, *size)]
        self._add(values, rng, "conv", 0)
        while len(self.steps) < depth or len(self._used()) < _LEAST or self._reaching() < 2:
            at = len(values) - 1 if rng.random() < 0.75 else rng.randrange(1, len(values))
            self._add(values, rng, rng.choice(_KINDS), at)
        self._prune()
        self.dense = rng.random() < 0.5
        out = values[-1].shape[1]
        self.head = _CONV[self.dims](out, 4, 1) if self.dense else nn.Linear(out, 4)

    def _used(self) -> list[int]:
        """Return the layers that the last one is made of."""
        used = {len(self.steps)}
        for i in reversed(range(len(self.steps))):
            if i + 1 in used:
                used |= {j for j in self.steps[i][1:] if j >= 0}
        return [i for i in range(len(self.steps)) if i + 1 in used]

    def _reaching(self) -> int:
        """Return how many layers behind the first one need pixels of the neighbours."""
        convolutions = [self.layers[i] for i in self._used()[1:] if self.steps[i][0] == "conv"]
        return sum(layer.kernel_size[0] > layer.stride[0] for layer in convolutions)

    def _prune(self) -> None:
        """Drop the layers that nothing reads."""
        kept = self._used()
        place = {-1: -1, 0: 0} | {i + 1: n + 1 for n, i in enumerate(kept)}
        self.layers = nn.ModuleList(self.layers[i] for i in kept)
        self.steps = [(k, place[a], place[b]) for k, a, b in (self.steps[i] for i in kept)]

    def _add(self, values: list[Tensor], rng: random.Random, kind: str, at: int) -> None:
        x, other = values[at], -1
        if kind in ("add", "cat"):
            fits = [
                i
                for i, v in enumerate(values)
                if i not in (0, at) and (v.shape == x.shape if kind == "add" else v.shape[2:] == x.shape[2:])
            ]
            if not fits or (kind == "cat" and x.shape[1] > 12):
                return
            other = rng.choice(fits)
        layer = self._layer(rng, kind, x)
        if layer is None or (kind == "conv" and _too_large(layer, x)):
            return
        with torch.no_grad():
            y = self._run(kind, layer.eval(), x, values[other])
        if not all(_SMALLEST <= n <= _LARGEST for n in y.shape[2:]):
            return
        self.layers.append(layer.train())
        self.steps.append((kind, at, other))
        values.append(y)

    def _layer(self, rng: random.Random, kind: str, x: Tensor) -> nn.Module | None:
        nd, c = self.dims, x.shape[1]
        if kind == "conv":
            groups = rng.choice([g for g in (1, 1, 1, 2, c) if c % g == 0])
            out, k, d = groups * rng.randint(1, max(1, 8 // groups)), rng.choice([1, 2, 3, 3, 3, 5]), 1
            if k == 3 and rng.random() < 0.2:
                d = 2
            mode = rng.choice(["zeros"] * 8 + ["reflect", "replicate", "circular"])
            pad = min(rng.choice([d * (k // 2), d * (k // 2), 0, 1]), _SMALLEST - 1)
            stride = rng.choice([1, 1, 1, 2, 3])
            return _CONV[nd](c, out, k, stride, pad, d, groups, rng.random() < 0.7, mode)
        if kind == "unconv":
            k, s = rng.choice([(2, 2), (3, 2), (4, 2), (3, 1), (3, 3)])
            return _UNCONV[nd](c, rng.randint(2, 6), k, s, rng.choice([0, 1]), rng.randrange(s))
        if kind == "max":
            k = rng.choice([2, 3])
            return _MAX[nd](k, rng.choice([1, 2]), rng.choice([0, 1]), ceil_mode=rng.random() < 0.3)
        if kind == "avg":
            k, counted = rng.choice([2, 3]), rng.random() < 0.5
            return _AVG[nd](k, rng.choice([1, 2]), rng.choice([0, 1]), rng.random() < 0.3, counted)
        if kind == "norm":
            return rng.choice(
                [
                    _BATCH_NORM[nd](c),
                    _BATCH_NORM[nd](c),
                    nn.GroupNorm(rng.choice([g for g in (1, 2, 4) if c % g == 0]), c),
                    _INSTANCE_NORM[nd](c, affine=True),
                    nn.LocalResponseNorm(3, alpha=0.5),
                ]
            )
        if kind == "act":
            return rng.choice([nn.ReLU(), nn.SiLU(), nn.LeakyReLU(0.1, inplace=False), nn.Tanh()])
        if kind == "up":
            mode = rng.choice(["nearest", "bilinear" if nd == 2 else "trilinear"])
            return nn.Upsample(scale_factor=rng.choice([2, 1.5]), mode=mode)
        return {"se": lambda: SqueezeExcite(c), "crop": Crop}.get(kind, nn.Identity)()

    @staticmethod
    def _run(kind: str, layer: nn.Module, x: Tensor, other: Tensor) -> Tensor:
        if kind == "add":
            return x + other
        if kind == "cat":
            return torch.cat([other, x], 1)
        result: Tensor = layer(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, (kind, at, other) in zip(self.layers, self.steps, strict=True):
            values.append(self._run(kind, layer, values[at], values[other]))
        y = values[-1]
        return self.head(y) if self.dense else self.head(y.flatten(2).mean(2))


def _too_large(layer: nn.Module, x: Tensor) -> bool:
    """Tell whether a kernel does not fit into the image and its padding."""
    reach = [d * (k - 1) + 1 for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    room = [n + 2 * p for n, p in zip(x.shape[2:], layer.padding, strict=True)]
    return any(r > n for r, n in zip(reach, room, strict=True))


_KINDS = (
    *("conv",) * 6, *("norm",) * 4, *("act",) * 4, *("add",) * 4, *("cat",) * 2,
    "max", "avg", "unconv", "up", "se", "crop",
)  # fmt: skip
