"""U-Net in two (Ronneberger et al., 2015) and three dimensions (Cicek et al., 2016).

    conv conv ------------------- skip ------------------- concat conv conv - 1x1
        pool |                                            | up
         conv conv -------------- skip --------- concat conv conv
             pool |                             | up
              conv conv  ...  (depth times)  ...

Convolutions are padded, so the output has the size of the input, which must be a multiple of 2**depth. The
two published networks differ in the widths: the 2-D one widens in the first convolution of a level and its
up-convolution halves the channels; the 3-D one widens in the second and keeps them. With 3 channels in and 3
classes the 3-D one has the 19,069,955 parameters of the paper, which counts no batch normalisation.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from ._init import kaiming

_CONV: dict[int, type[nn.Conv2d | nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}
_UP_CONV: dict[int, type[nn.ConvTranspose2d | nn.ConvTranspose3d]] = {
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}
_BATCH_NORM: dict[int, type[nn.BatchNorm2d | nn.BatchNorm3d]] = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_MAX_POOL: dict[int, type[nn.MaxPool2d | nn.MaxPool3d]] = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
_LINEAR_MODE = {2: "bilinear", 3: "trilinear"}


def _double_conv(dims: int, widths: tuple[int, int, int], batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers.append(_CONV[dims](inputs, outputs, 3, padding=1, bias=not batch_norm))
        if batch_norm:
            layers.append(_BATCH_NORM[dims](outputs))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class Up(nn.Module):
    """Double the resolution, append the skip and convolve twice."""

    def __init__(
        self, dims: int, inputs: int, skip: int, outputs: int, up: str, halve: bool, batch_norm: bool
    ) -> None:
        super().__init__()
        if up == "transpose":
            raised = inputs // 2 if halve else inputs
            # The published 3-D count has no biases here, the 2-D one has.
            self.up: nn.Module = _UP_CONV[dims](inputs, raised, 2, stride=2, bias=dims == 2)
        else:
            raised = inputs
            self.up = nn.Upsample(scale_factor=2, mode=_LINEAR_MODE[dims], align_corners=False)
        self.conv = _double_conv(dims, (skip + raised, outputs, outputs), batch_norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Return the features at the skip's resolution."""
        out: Tensor = self.conv(torch.cat([skip, self.up(x)], dim=1))
        return out


class UNet(nn.Module):
    """Label every pixel or voxel with an encoder, a decoder and skips between them.

    Args:
        dims: 2 for images, 3 for volumes.
        num_classes: output channels.
        in_channels: channels of the input.
        base: filters of the first level (64 in 2-D, 32 in 3-D as published); each level doubles them.
        depth: number of poolings (4 in 2-D, 3 in 3-D as published).
        batch_norm: normalise after every 3x3 convolution, which then has no bias.
        up: "transpose" for transposed convolutions, "linear" for bilinear or trilinear up-sampling.
    """

    def __init__(
        self,
        dims: int = 2,
        num_classes: int = 2,
        in_channels: int = 3,
        base: int = 64,
        depth: int = 4,
        batch_norm: bool = True,
        up: str = "transpose",
    ) -> None:
        super().__init__()
        if dims not in _CONV:
            raise ValueError(f"U-Net dims is {dims}; it can be 2 or 3")
        if up not in ("transpose", "linear"):
            raise ValueError(f"U-Net up is {up!r}; it can be 'transpose' or 'linear'")
        if depth < 1:
            raise ValueError(f"U-Net depth is {depth}; it needs at least one pooling")
        late = dims == 3
        encoder, pools, skips = [], [], []
        channels = in_channels
        for level in range(depth + 1):
            width = base * 2**level
            widths = (channels, width, 2 * width) if late else (channels, width, width)
            encoder.append(_double_conv(dims, widths, batch_norm))
            channels = widths[-1]
            skips.append(channels)
            pools.append(_MAX_POOL[dims](2))
        self.encoder = nn.ModuleList(encoder)
        self.pools = nn.ModuleList(pools[:depth])
        decoder = []
        for skip in reversed(skips[:depth]):
            decoder.append(Up(dims, channels, skip, skip, up, halve=not late, batch_norm=batch_norm))
            channels = skip
        self.decoder = nn.ModuleList(decoder)
        self.head = _CONV[dims](channels, num_classes, 1)
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of every pixel or voxel of a batch."""
        skips = []
        for level, pool in zip(self.encoder, self.pools, strict=False):
            x = level(x)
            skips.append(x)
            x = pool(x)
        x = self.encoder[-1](x)
        for level, skip in zip(self.decoder, reversed(skips), strict=True):
            x = level(x, skip)
        out: Tensor = self.head(x)
        return out
