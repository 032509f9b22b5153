"""CosmoFlow: regress four cosmological parameters from a cube of dark-matter densities.

Three published descendants of the network of Mathuriya et al. (2018), chosen by `variant`:

=========  ==============================================================  ===============================
variant    described in                                                    parameters
=========  ==============================================================  ===============================
"paradl"   ParaDL's layer table (7 convolutions, kernels 3 and 2)          2.13 M at any power of two
"lbann"    Oyama et al. (2020), LBANN (7 convolutions, overlapping pools)  9.44 M at any power of two
"mlperf"   MLPerf HPC, LBANN's version (5 convolutions at 128, 7 at 512)   8.9 M at 128
=========  ==============================================================  ===============================

The number of halvings follows from the input size: "paradl" and "lbann" keep their seven convolutions and
drop or add poolings and strides until a 2-voxel cube is left; "mlperf" adds convolutions, down to 4 voxels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from ._init import kaiming


@dataclass(frozen=True)
class ConvSpec:
    """Describe one convolution and whether a pool follows it."""

    channels: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    pool: bool = False


@dataclass(frozen=True)
class Variant:
    """Describe what the three published networks do differently."""

    width: int
    hidden: tuple[int, int]
    dropout: float
    conv_bias: bool
    slope: float
    pool: tuple[str, int, int]  # kind, kernel, padding; the stride is always 2
    bounded: bool  # the output is 1.2 tanh(x), as the targets are scaled to [-1, 1]


VARIANTS = {
    "paradl": Variant(16, (2048, 256), 0.0, False, 0.2, ("average", 2, 0), False),
    "lbann": Variant(16, (2048, 256), 0.2, False, 0.01, ("average", 3, 1), False),
    "mlperf": Variant(32, (128, 64), 0.5, True, 0.3, ("max", 2, 0), True),
}


def paradl_convolutions(size: int, width: int = 16, padded: bool = True) -> list[ConvSpec]:
    """Return ParaDL's seven convolutions for a cube of the given side.

    The table for 256 voxels is padded and that for 512 is not; `padded` chooses for any size.
    """
    padding = 1 if padded else 0
    multiples_kernels = ((1, 3), (2, 3), (4, 3), (8, 3), (16, 2), (16, 2), (8, 2))
    specs = [ConvSpec(width * multiple, kernel, 1, padding) for multiple, kernel in multiples_kernels]
    # The last convolution closes the remaining 2-voxel cube.
    specs[6] = replace(specs[6], padding=0)
    # A padded kernel of 2 adds a voxel that only a pool removes, so convolutions 5 and 6 are pooled first.
    halvings = size.bit_length() - (2 if padded else 3)
    pools = (5, 4, 0, 1, 2, 3)[: max(halvings, 0)]
    strided = ((3, 2, 1, 0) if padded else (2, 3, 1, 0))[: max(halvings - 6, 0)]
    return [
        replace(spec, pool=index in pools, stride=2 if index in strided else 1)
        for index, spec in enumerate(specs)
    ]


def lbann_convolutions(size: int, width: int = 16) -> list[ConvSpec]:
    """Return LBANN's seven convolutions for a cube of the given side."""
    halvings = size.bit_length() - 2
    return [
        ConvSpec(width * multiple, stride=2 if index == 3 and halvings > 0 else 1, pool=index < halvings - 1)
        for index, multiple in enumerate((1, 2, 4, 8, 16, 16, 16))
    ]


def mlperf_convolutions(size: int, width: int = 32) -> list[ConvSpec]:
    """Return the pooled convolutions that leave 4 voxels a side of a cube of the given side."""
    return [ConvSpec(width * 2 ** min(index, 4), pool=True) for index in range(size.bit_length() - 3)]


class CosmoFlow(nn.Module):
    """Regress a few numbers from a volume.

    Args:
        input_size: voxels per side, or one number per axis; it fixes the first dense layer.
        variant: "paradl", "lbann" or "mlperf".
        num_outputs: numbers to regress.
        in_channels: channels of the volume.
        width: filters of the first convolution (default as published).
        hidden: features of the two hidden dense layers (default as published).
        dropout: probability of dropping a feature in the dense part (default as published).
        batch_norm: normalise after every convolution.
        padded: only for "paradl": pad the convolutions; without, size 512 is exactly ParaDL's table.
    """

    def __init__(
        self,
        input_size: int | Sequence[int] = 128,
        variant: str = "paradl",
        num_outputs: int = 4,
        in_channels: int = 4,
        width: int | None = None,
        hidden: tuple[int, int] | None = None,
        dropout: float | None = None,
        batch_norm: bool = False,
        padded: bool = True,
    ) -> None:
        super().__init__()
        if variant not in VARIANTS:
            raise ValueError(f"CosmoFlow variant is {variant!r}; it can be one of {sorted(VARIANTS)}")
        kind = VARIANTS[variant]
        sides = (input_size,) * 3 if isinstance(input_size, int) else tuple(input_size)
        width = kind.width if width is None else width
        if variant == "paradl":
            specs = paradl_convolutions(min(sides), width, padded)
        elif not padded:
            raise ValueError(
                f"CosmoFlow padded=False is only defined for variant 'paradl', found {variant!r}"
            )
        else:
            specs = (lbann_convolutions if variant == "lbann" else mlperf_convolutions)(min(sides), width)
        grid = _grid(sides, specs, kind)

        layers: list[nn.Module] = []
        channels = in_channels
        for spec in specs:
            bias = kind.conv_bias and not batch_norm
            layers.append(
                nn.Conv3d(channels, spec.channels, spec.kernel, spec.stride, spec.padding, bias=bias)
            )
            if batch_norm:
                layers.append(nn.BatchNorm3d(spec.channels))
            layers.append(nn.LeakyReLU(kind.slope))
            if spec.pool:
                pool, kernel, padding = kind.pool
                pools = nn.AvgPool3d if pool == "average" else nn.MaxPool3d
                layers.append(pools(kernel, 2, padding))
            channels = spec.channels
        self.features = nn.Sequential(*layers)
        self.flatten = nn.Flatten()
        first, second = kind.hidden if hidden is None else hidden
        drop = kind.dropout if dropout is None else dropout
        self.regressor = nn.Sequential(
            nn.Linear(channels * prod(grid), first),
            nn.LeakyReLU(kind.slope),
            nn.Dropout(drop),
            nn.Linear(first, second),
            nn.LeakyReLU(kind.slope),
            nn.Dropout(drop),
            nn.Linear(second, num_outputs),
        )
        self.bounded = kind.bounded
        kaiming(self, kind.slope)

    def forward(self, x: Tensor) -> Tensor:
        """Return the regressed numbers of a batch of volumes."""
        x = self.regressor(self.flatten(self.features(x)))
        return 1.2 * torch.tanh(x) if self.bounded else x


def _grid(sides: tuple[int, ...], specs: list[ConvSpec], kind: Variant) -> tuple[int, ...]:
    """Return the size of the last feature map, or refuse an input that vanishes on the way."""
    if not specs:
        raise ValueError(f"CosmoFlow input_size {sides} is too small; use at least 8 voxels a side")
    if len(sides) != 3:
        raise ValueError(f"CosmoFlow input_size has {len(sides)} axes; it needs one number or three")
    _, pool_kernel, pool_padding = kind.pool
    grid: tuple[int, ...] = sides
    for index, spec in enumerate(specs, start=1):
        grid = tuple((n + 2 * spec.padding - spec.kernel) // spec.stride + 1 for n in grid)
        if spec.pool:
            grid = tuple((n + 2 * pool_padding - pool_kernel) // 2 + 1 for n in grid)
        if min(grid) < 1:
            raise ValueError(
                f"CosmoFlow input_size {sides} leaves nothing after convolution {index}; "
                "use padded=True, or at least 66 voxels a side without"
            )
    return grid
