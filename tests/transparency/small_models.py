"""Small networks, each with the one thing that some other implementation gets wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convs(**settings: object) -> nn.Module:
    """Three convolutions, the middle one with the given settings."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, **settings), nn.Tanh(), nn.Conv2d(4, 2, 1)
    )


def between(*layers: nn.Module) -> nn.Module:
    """Put layers between two convolutions; the first makes mostly negative values."""
    first = nn.Conv2d(3, 4, 3, padding=1)
    with torch.no_grad():
        first.bias.sub_(3.0)
    return nn.Sequential(first, *layers, nn.Conv2d(4, 2, 3, padding=1))


class Skip(nn.Module):
    """A skip from the first layer to the last, over everything between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.middle = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        self.last = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = y = F.relu(self.first(x))
        for conv in self.middle:
            y = F.relu(conv(y))
        return self.last(torch.cat([first, y], 1))


class Unused(nn.Module):
    """A parameter and a batch norm that the output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.idle = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(2, 2)
        self.aside, self.last = nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.aside(y)
        return self.last(y)


class SharedGradient(nn.Module):
    """A sum hands one gradient to two norms, which both pass theirs on to the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.left, self.right = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.last = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        a = self.left(y)
        return self.last(a + self.right(a) + y)


class Opaque(nn.Module):
    """A module that no rule knows, with weights, random numbers left out, between tiled layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.inner = Sorting()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Sorting(nn.Module):
    """Sort the pixels of each row, with a weight per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError("tracing with stand-ins for tensors ends here")
        return torch.sort(x * self.weight, -1)[0]


class Frames(nn.Module):
    """A batch norm over the frames of all samples, folded into the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.reshape(x.shape[0], -1, 2, *x.shape[2:]).flatten(0, 1)
        return torch.relu(self.norm(self.conv(frames))).unflatten(0, (x.shape[0], -1)).mean(1)


class Twins(nn.Module):
    """One network for an image and its mirror image, as twice as many samples."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.relu(self.norm(self.conv(torch.cat([x, x.flip(3)], 0))))
        return both[: x.shape[0]] * both[x.shape[0] :]


SMALL: dict[str, Callable[[], nn.Module]] = {
    "conv3": lambda: convs(kernel_size=3, padding=1),
    "conv3 twice": lambda: between(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)),
    "conv3 stride 2": lambda: convs(kernel_size=3, stride=2, padding=1),
    "conv3 stride 2 unpadded": lambda: nn.Conv2d(3, 2, 3, stride=2),
    "conv4": lambda: convs(kernel_size=4, padding=1),
    "conv dilated": lambda: convs(kernel_size=3, dilation=2),
    "conv groups": lambda: convs(kernel_size=3, padding=1, groups=2),
    "conv reflect": lambda: convs(kernel_size=3, padding=1, padding_mode="reflect"),
    "conv circular": lambda: convs(kernel_size=3, padding=1, padding_mode="circular"),
    "batch norm": lambda: between(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)),
    "deep chain": lambda: between(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))),
    "deep chain with norms": lambda: between(
        *(m for _ in range(3) for m in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))
    ),
    "max pool 3": lambda: between(nn.MaxPool2d(3, 1, 1)),
    "max pool 3 stride 2": lambda: between(nn.MaxPool2d(3, 2)),
    "avg pool uncounted": lambda: between(nn.AvgPool2d(3, 1, 1, count_include_pad=False)),
    "transposed 3": lambda: between(nn.ConvTranspose2d(4, 4, 3, 2, 1, 1)),
    "signal": lambda: nn.Sequential(
        nn.Conv1d(3, 4, 5, stride=2, padding=2),
        *(nn.BatchNorm1d(4), nn.ReLU(), nn.MaxPool1d(3, 1, 1)),
        nn.ConvTranspose1d(4, 4, 4, stride=2, padding=1),
        nn.Conv1d(4, 2, 3, padding=1),
    ),
    "narrowing": lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    ),
    "skip": Skip,
    "unused": Unused,
    "opaque": Opaque,
    "shared gradient": SharedGradient,
    "frames": Frames,
    "twins": Twins,
}
