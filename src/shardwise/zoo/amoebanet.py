"""AmoebaNet-D (Real et al., 2018) of any depth and width, as GPipe and Hy-Fi scale it.

    image - stem - R - R - N x L/3 - R - N x L/3 - R - N x L/3 - pool - dense

N is a normal cell, R a reduction cell, and every cell reads the outputs of the two cells before it. A cell
first brings both inputs to its own width (states 0 and 1), then forms five new states, each the sum of two
operations on earlier states, and concatenates some of them. GPipe's published sizes come out when a normal
cell concatenates states 0, 3, 4 and 6, as Google's implementation does, instead of 4, 5 and 6 as drawn in the
paper.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ._init import kaiming

Genotype = tuple[tuple[int, str], ...]

NORMAL: Genotype = (
    *((1, "conv_1x1"), (1, "max_pool_3x3")),
    *((1, "identity"), (0, "conv_1x7_7x1")),
    *((0, "conv_1x1"), (0, "conv_1x7_7x1")),
    *((2, "max_pool_3x3"), (2, "identity")),
    *((1, "avg_pool_3x3"), (5, "conv_1x1")),
)
"""Five pairs of (state read, operation); pair i forms state i + 2."""
NORMAL_OUTPUTS = (0, 3, 4, 6)

REDUCTION: Genotype = (
    *((0, "max_pool_2x2"), (0, "max_pool_3x3")),
    *((2, "identity"), (1, "conv_3x3")),
    *((2, "conv_1x7_7x1"), (2, "max_pool_3x3")),
    *((3, "identity"), (1, "max_pool_2x2")),
    *((2, "avg_pool_3x3"), (3, "conv_1x1")),
)
REDUCTION_OUTPUTS = (4, 5, 6)

Kernel = int | tuple[int, int]


def _relu_conv_bn(inputs: int, outputs: int, kernel: Kernel = 1, stride: Kernel = 1) -> nn.Sequential:
    padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(outputs))


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    return nn.Sequential(
        *_relu_conv_bn(channels, inner),
        *_relu_conv_bn(inner, inner, 3, stride),
        *_relu_conv_bn(inner, channels),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    return nn.Sequential(
        *_relu_conv_bn(channels, inner),
        *_relu_conv_bn(inner, inner, (1, 7), (1, stride)),
        *_relu_conv_bn(inner, inner, (7, 1), (stride, 1)),
        *_relu_conv_bn(inner, channels),
    )


class FactorizedReduce(nn.Module):
    """Halve the image with two 1x1 convolutions, one over even and one over odd pixels.

    The shift crops the first row and column and pads the last, so that both halves have the same size for
    odd images too.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.shift = nn.ZeroPad2d((-1, 1, -1, 1))
        self.conv1 = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.conv2 = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the reduced states of a batch of states."""
        x = self.relu(x)
        x = torch.cat([self.conv1(x), self.conv2(self.shift(x))], dim=1)
        out: Tensor = self.bn(x)
        return out


OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "identity": lambda channels, stride: (
        nn.Identity() if stride == 1 else FactorizedReduce(channels, channels)
    ),
    "avg_pool_3x3": lambda _, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
    "max_pool_3x3": lambda _, stride: nn.MaxPool2d(3, stride, padding=1),
    # Rounding up keeps odd images in step with the padded operations beside this pool.
    "max_pool_2x2": lambda _, stride: nn.MaxPool2d(2, stride, ceil_mode=True),
    "conv_1x1": lambda channels, stride: _relu_conv_bn(channels, channels, 1, stride),
    "conv_3x3": _conv_3x3,
    "conv_1x7_7x1": _conv_1x7_7x1,
}
"""Builders of the genotype's operations, from channels and stride."""


class Cell(nn.Module):
    """Compute one normal or reduction cell from the outputs of the two cells before it."""

    def __init__(self, before: int, last: int, channels: int, reduction: bool, after_reduction: bool) -> None:
        super().__init__()
        genotype = REDUCTION if reduction else NORMAL
        self.sources = tuple(source for source, _ in genotype)
        self.outputs = REDUCTION_OUTPUTS if reduction else NORMAL_OUTPUTS
        self.channels = channels * len(self.outputs)
        self.reduce1 = _relu_conv_bn(last, channels)
        self.reduce2: nn.Module = nn.Identity()
        if after_reduction:
            self.reduce2 = FactorizedReduce(before, channels)
        elif before != channels:
            self.reduce2 = _relu_conv_bn(before, channels)
        # Only the cell's inputs are still large; its own states are reduced already.
        self.operations = nn.ModuleList(
            OPERATIONS[name](channels, 2 if reduction and source < 2 else 1) for source, name in genotype
        )

    def forward(self, last: Tensor, before: Tensor) -> Tensor:
        """Return the concatenated states for the last cell's output and the one before it."""
        states = [self.reduce1(last), self.reduce2(before)]
        steps = list(zip(self.operations, self.sources, strict=True))
        for (left, left_source), (right, right_source) in zip(steps[::2], steps[1::2], strict=True):
            states.append(left(states[left_source]) + right(states[right_source]))
        return torch.cat([states[index] for index in self.outputs], dim=1)


class AmoebaNetD(nn.Module):
    """Classify images with AmoebaNet-D (L, D).

    Args:
        num_layers: number of normal cells L, a multiple of 3.
        num_filters: width D; the stem has D // 4 filters and every reduction doubles them.
        num_classes: outputs of the classifier.
        in_channels: channels of the image.
    """

    def __init__(
        self, num_layers: int = 18, num_filters: int = 208, num_classes: int = 1000, in_channels: int = 3
    ) -> None:
        super().__init__()
        if num_layers < 3 or num_layers % 3:
            raise ValueError(f"AmoebaNet-D num_layers is {num_layers}; it must be a positive multiple of 3")
        if num_filters < 8:
            raise ValueError(f"AmoebaNet-D num_filters is {num_filters}; it must be at least 8")
        channels = num_filters // 4
        stem = nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(channels))
        normals = [False] * (num_layers // 3)
        reductions = [True, True, *normals, True, *normals, True, *normals]
        cells: list[Cell] = []
        before = last = channels
        after_reduction = False
        for reduction in reductions:
            channels *= 2 if reduction else 1
            cells.append(Cell(before, last, channels, reduction, after_reduction))
            before, last, after_reduction = last, cells[-1].channels, reduction
        self.cells = nn.ModuleList(cells)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(last, num_classes)
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.stem(x)
        before = x
        for cell in self.cells:
            x, before = cell(x, before), x
        out: Tensor = self.fc(self.flatten(self.avgpool(x)))
        return out
