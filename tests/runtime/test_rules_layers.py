"""Every kind of layer on tiles, filters, channels and samples equals the layer itself."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rules_harness import compare, run_split, subject
from torch import Tensor, nn

IMAGE = (3, 4, 13, 17)
LINE = (3, 4, 29)
VOLUME = (2, 4, 7, 9, 8)

PLANS_2D = (
    "spatial=2",
    "spatial=4x1",
    "spatial=1x3",
    "spatial=2x2",
    "filter=2",
    "channel=3",
    "pairs=2",
    "batch=2",
)
PLANS_1D = ("spatial=3", "filter=2", "channel=2")
PLANS_3D = ("spatial=2x2x2", "spatial=1x1x3", "spatial=3", "channel=2")


class Fn(nn.Module):
    """A function between two layers with weights, so that gradients pass on either side of it."""

    def __init__(
        self, fn: Callable[..., Tensor], channels: int = 4, out: int | None = None, nd: int = 2
    ) -> None:
        super().__init__()
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[nd]
        self.before = conv(channels, 4, 1)
        self.fn = fn
        self.after = conv(out or 4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.fn(self.before(x)))


def conv(nd: int = 2, **settings: object) -> nn.Module:
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[nd]
    return nn.Sequential(kind(4, 6, **settings), nn.ReLU(), kind(6, 4, 1))


def after(layer: nn.Module, channels: int = 4, nd: int = 2) -> nn.Module:
    """Put a convolution before and behind a layer."""
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[nd]
    return nn.Sequential(kind(4, 4, 1), layer, kind(channels, 4, 1))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.down, self.up = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        gate = torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3), keepdim=True)))))
        return self.inner(y * gate)


class ChannelNorm(nn.Module):
    """Layer norm over channels, as ConvNeXt writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.conv(y)


class Classifier(nn.Module):
    def __init__(self, pooled: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.pool, self.line = nn.AdaptiveAvgPool2d(pooled), nn.Linear(4 * pooled * pooled, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.line(torch.flatten(self.pool(self.conv(x)), 1)), 1)


class Chain(nn.Module):
    """Norms that share statistics between convolutions that need halos, and a skip around them."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(len(norms) + 1))
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv, norm in zip(self.convs, self.norms, strict=False):
            y = F.relu(norm(conv(y)))
        return self.convs[-1](x + y)


class SharedWeights(nn.Module):
    """One convolution and one scale, used at two resolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x) * self.scale
        return self.conv(F.max_pool2d(y, 2)) * self.scale


def cat_parts(x: Tensor) -> Tensor:
    return torch.cat([x[:, :3], x.relu(), x[:, 1:2]], 1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv3": (lambda: conv(kernel_size=3, padding=1), IMAGE),
    "conv5 stride 3": (lambda: conv(kernel_size=5, stride=3, padding=2), IMAGE),
    "conv even kernel": (lambda: conv(kernel_size=(4, 2), padding=(2, 0)), IMAGE),
    "conv dilated": (lambda: conv(kernel_size=3, dilation=(3, 2), padding=(3, 1)), IMAGE),
    "conv 1x1 stride 2": (lambda: conv(kernel_size=1, stride=2), IMAGE),
    "conv 1x1 padded": (lambda: conv(kernel_size=1, padding=2), IMAGE),
    "conv same": (lambda: conv(kernel_size=(5, 3), dilation=(1, 2), padding="same"), IMAGE),
    "conv groups": (lambda: conv(kernel_size=3, padding=1, groups=2), IMAGE),
    "conv depthwise": (lambda: after(nn.Conv2d(4, 8, 3, padding=1, groups=4), 8), IMAGE),
    "conv reflect": (lambda: conv(kernel_size=5, padding=2, padding_mode="reflect"), IMAGE),
    "conv replicate": (lambda: conv(kernel_size=3, padding=3, padding_mode="replicate"), IMAGE),
    "conv circular": (lambda: conv(kernel_size=5, padding=2, padding_mode="circular"), IMAGE),
    "conv large kernel": (lambda: conv(kernel_size=11, padding=5), IMAGE),
    "transposed 2": (lambda: after(nn.ConvTranspose2d(4, 4, 2, 2)), IMAGE),
    "transposed 3": (lambda: after(nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), 6), IMAGE),
    "transposed odd": (lambda: after(nn.ConvTranspose2d(4, 4, (5, 3), (3, 2), (2, 0), (2, 1))), IMAGE),
    "transposed gaps": (lambda: after(nn.ConvTranspose2d(4, 4, 2, 4, 1, bias=False)), IMAGE),
    "transposed groups": (lambda: after(nn.ConvTranspose2d(4, 8, 3, 2, 1, groups=2), 8), IMAGE),
    "transposed dilated": (lambda: after(nn.ConvTranspose2d(4, 4, 3, 2, 2, dilation=2)), IMAGE),
    "max pool": (lambda: after(nn.MaxPool2d(3, 2, 1)), IMAGE),
    "max pool ceil": (lambda: after(nn.MaxPool2d(3, 2, ceil_mode=True)), IMAGE),
    "max pool dilated": (lambda: after(nn.MaxPool2d(3, 1, 1, dilation=2)), IMAGE),
    "avg pool": (lambda: after(nn.AvgPool2d(3, 2, 1)), IMAGE),
    "avg pool without padding": (lambda: after(nn.AvgPool2d(3, 2, 1, count_include_pad=False)), IMAGE),
    "avg pool ceil": (lambda: after(nn.AvgPool2d((4, 3), 3, 1, ceil_mode=True)), IMAGE),
    "avg pool divisor": (lambda: after(nn.AvgPool2d(3, 1, 1, divisor_override=5)), IMAGE),
    "adaptive avg": (lambda: after(nn.AdaptiveAvgPool2d((5, 7))), IMAGE),
    "adaptive avg regular": (lambda: after(nn.AdaptiveAvgPool2d((4, 8))), (2, 4, 12, 16)),
    "adaptive avg up": (lambda: after(nn.AdaptiveAvgPool2d((15, 17))), IMAGE),
    "adaptive max": (lambda: after(nn.AdaptiveMaxPool2d((5, 3))), IMAGE),
    "adaptive max regular": (lambda: after(nn.AdaptiveMaxPool2d((4, 8))), (2, 4, 12, 16)),
    "global max": (lambda: after(nn.AdaptiveMaxPool2d(1)), IMAGE),
    "batch norm": (lambda: after(nn.BatchNorm2d(4)), IMAGE),
    "batch norm cumulative": (lambda: after(nn.BatchNorm2d(4, momentum=None)), IMAGE),
    "batch norm plain": (lambda: after(nn.BatchNorm2d(4, affine=False, track_running_stats=False)), IMAGE),
    "group norm": (lambda: after(nn.GroupNorm(2, 4)), IMAGE),
    "group norm one": (lambda: after(nn.GroupNorm(1, 4, affine=False)), IMAGE),
    "instance norm": (lambda: after(nn.InstanceNorm2d(4, affine=True)), IMAGE),
    "instance norm tracked": (lambda: after(nn.InstanceNorm2d(4, track_running_stats=True)), IMAGE),
    "chain of norms": (
        lambda: Chain(nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)),
        (3, 4, 33, 29),
    ),
    "layer norm over channels": (ChannelNorm, IMAGE),
    "layer norm over pixels": (lambda: after(nn.LayerNorm((4, 13, 17))), IMAGE),
    "local response norm": (lambda: after(nn.LocalResponseNorm(3, alpha=0.5)), IMAGE),
    "activations in place": (
        lambda: after(nn.Sequential(nn.Sigmoid(), nn.Hardswish(), nn.ReLU(inplace=True))),
        IMAGE,
    ),
    "prelu": (lambda: after(nn.PReLU(4)), IMAGE),
    "softmax over channels": (lambda: after(nn.Softmax(1)), IMAGE),
    "softmax over pixels": (lambda: after(nn.Softmax(3)), IMAGE),
    "residual": (lambda: Fn(lambda x: x + F.avg_pool2d(x, 3, 1, 1) * 2.0), IMAGE),
    "cat": (lambda: Fn(cat_parts, out=8), IMAGE),
    "chunk": (lambda: Fn(lambda x: torch.mul(*x.chunk(2, 1)), out=2), IMAGE),
    "slice": (lambda: Fn(lambda x: x[:, 1:, 2:-3, 1::2], out=3), IMAGE),
    "pad": (lambda: Fn(lambda x: F.pad(x, (3, 1, 0, 2), value=0.5)), IMAGE),
    "pad and crop": (lambda: Fn(lambda x: F.pad(x, (-1, 1, -1, 1))), IMAGE),
    "pad reflect": (lambda: Fn(lambda x: F.pad(x, (3, 4, 2, 1), mode="reflect")), IMAGE),
    "pad channels": (lambda: Fn(lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), out=7), IMAGE),
    "nearest": (lambda: Fn(lambda x: F.interpolate(x, scale_factor=2)), IMAGE),
    "nearest to size": (lambda: Fn(lambda x: F.interpolate(x, size=(20, 11))), IMAGE),
    "nearest-exact": (lambda: Fn(lambda x: F.interpolate(x, size=(20, 11), mode="nearest-exact")), IMAGE),
    "bilinear": (lambda: Fn(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")), IMAGE),
    "bilinear corners": (
        lambda: Fn(lambda x: F.interpolate(x, size=(19, 9), mode="bilinear", align_corners=True)),
        IMAGE,
    ),
    "bicubic": (lambda: Fn(lambda x: F.interpolate(x, size=(19, 30), mode="bicubic")), IMAGE),
    "area": (lambda: Fn(lambda x: F.interpolate(x, size=(6, 5), mode="area")), IMAGE),
    "pixel shuffle": (lambda: Fn(lambda x: F.pixel_shuffle(x, 2), out=1), IMAGE),
    "pixel unshuffle": (lambda: Fn(lambda x: F.pixel_unshuffle(x, 2), out=16), (2, 4, 10, 14)),
    "channel shuffle": (lambda: Fn(lambda x: F.channel_shuffle(x, 2)), IMAGE),
    "transpose": (lambda: Fn(lambda x: x.transpose(2, 3)), IMAGE),
    "flip": (lambda: Fn(lambda x: x.flip(3)), IMAGE),
    "expand": (lambda: Fn(lambda x: x + x.mean((2, 3), keepdim=True).expand(-1, -1, 13, 17)), IMAGE),
    "expand columns": (
        lambda: Fn(lambda x: x * x.mean(3, keepdim=True).expand(-1, -1, -1, 17).sigmoid()),
        IMAGE,
    ),
    "expand channels": (lambda: Fn(lambda x: x * x.mean(1, keepdim=True).expand(3, 4, 13, 17)), IMAGE),
    "amax": (lambda: Fn(lambda x: x * x.amax((2, 3), keepdim=True)), IMAGE),
    "squeeze-excite": (SqueezeExcite, IMAGE),
    "shared weights": (SharedWeights, IMAGE),
    "classifier": (lambda: Classifier(1), IMAGE),
    "classifier of 3x3": (lambda: Classifier(3), IMAGE),
    "conv 1-D": (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 3, 2, 1), nn.BatchNorm1d(4), nn.ConvTranspose1d(4, 4, 4, 2, 1)),
        LINE,
    ),
    "pools 1-D": (lambda: after(nn.Sequential(nn.AvgPool1d(3, 2, 1), nn.MaxPool1d(2)), nd=1), LINE),
    "adaptive 1-D": (lambda: after(nn.AdaptiveAvgPool1d(5), nd=1), LINE),
    "linear 1-D": (lambda: Fn(lambda x: F.interpolate(x, size=40, mode="linear"), nd=1), LINE),
    "conv 3-D": (
        lambda: nn.Sequential(
            nn.Conv3d(4, 4, 3, 1, 1),
            nn.GroupNorm(2, 4),
            nn.ConvTranspose3d(4, 4, 2, 2),
            nn.MaxPool3d(3, 2, 1),
        ),
        VOLUME,
    ),
    "conv 3-D dilated groups": (
        lambda: conv(nd=3, kernel_size=(3, 2, 3), dilation=(1, 2, 2), stride=(1, 2, 1), padding=1, groups=2),
        VOLUME,
    ),
    "conv 3-D reflect": (
        lambda: conv(nd=3, kernel_size=3, padding=(1, 2, 1), padding_mode="reflect"),
        VOLUME,
    ),
    "conv 3-D circular": (lambda: conv(nd=3, kernel_size=3, padding=1, padding_mode="circular"), VOLUME),
    "transposed 3-D groups": (
        lambda: after(nn.ConvTranspose3d(4, 4, 3, (2, 1, 2), 1, (1, 0, 0), groups=2), nd=3),
        VOLUME,
    ),
    "trilinear": (lambda: Fn(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), nd=3), VOLUME),
    "pools 3-D": (
        lambda: after(
            nn.Sequential(nn.AvgPool3d(3, 2, 1, count_include_pad=False), nn.AdaptiveAvgPool3d(3)), nd=3
        ),
        VOLUME,
    ),
}


LAYERS |= {
    "conv 1-D dilated groups": (
        lambda: conv(nd=1, kernel_size=4, dilation=2, stride=3, padding=3, groups=2),
        LINE,
    ),
    "conv 1-D circular": (lambda: conv(nd=1, kernel_size=5, padding=2, padding_mode="circular"), LINE),
}


def plans(shape: tuple[int, ...]) -> tuple[str, ...]:
    return {3: PLANS_1D, 4: PLANS_2D, 5: PLANS_3D}[len(shape)]


# With more ranks than samples some rank has nothing behind the last tile.
CROWDED = ("spatial=4x1 tail=batch", "spatial=1x4 tail=batch halo=fused")
TAILS = ("halo=fused", "halo=auto", "halo=3 tail=replicate", "tail=batch", "tail=filter halo=fused")


@pytest.mark.parametrize("name", list(LAYERS))
def test_layer_split_equals_layer(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    lines = plans(shape)
    tails = (f"{lines[0]} {options}" for options in TAILS)
    crowded = CROWDED if len(shape) == 4 else ()
    compare(make(), shape, (*lines, *tails, *crowded, "channel=2 halo=fused", "filter=3 halo=fused"))


def test_local_batch_norm_means_each_shard_by_itself() -> None:
    torch.manual_seed(1)
    model = after(nn.BatchNorm2d(4)).double()
    it = subject(model, IMAGE)
    found = run_split(it, it.lower("batch=2 batch_norm=local"))
    (x,) = it.inputs
    expected = torch.cat([copy.deepcopy(model)(x[:2]), copy.deepcopy(model)(x[2:])])
    assert torch.allclose(found["output"], expected, rtol=0, atol=1e-12)
    synced = run_split(it, it.lower("batch=2"))
    assert not torch.allclose(synced["output"], expected, rtol=0, atol=1e-3)
