"""Small networks of many families, written the way people write them, for the tests of capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A model, the shapes of its inputs, and two other sets of shapes that it takes."""

    build: Callable[[], nn.Module]
    shapes: tuple[Shape, ...]
    others: tuple[tuple[Shape, ...], ...]
    known: float = 0.98


def images(build: Callable[[], nn.Module], size: int = 32, *, channels: int = 3, known: float = 0.98) -> Case:
    others = (((3, channels, size + 8, size),), ((1, channels, size, size + 16),))
    return Case(build, ((2, channels, size, size),), others, known)


def fixed(build: Callable[[], nn.Module], size: int = 32, *, channels: int = 3, known: float = 0.98) -> Case:
    """A model that takes one image size only: other batches."""
    shape = (channels, size, size)
    return Case(build, ((2, *shape),), (((3, *shape),), ((5, *shape),)), known)


def volumes(build: Callable[[], nn.Module]) -> Case:
    return Case(build, ((2, 1, 16, 16, 16),), (((1, 1, 16, 24, 16),), ((3, 1, 8, 16, 16),)))


def signals(build: Callable[[], nn.Module]) -> Case:
    return Case(build, ((2, 2, 64),), (((3, 2, 80),), ((1, 2, 96),)))


def cbr(i: int, o: int, k: int = 3, s: int = 1, g: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, groups=g, bias=False), nn.BatchNorm2d(o), act())


class Head(nn.Module):
    def __init__(self, c: int, classes: int = 10) -> None:
        super().__init__()
        self.fc = nn.Linear(c, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(400, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


class AlexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 7, 2, 2)
        self.norm = nn.LocalResponseNorm(5)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.conv2 = nn.Conv2d(16, 32, 3, padding="same", groups=2)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(32 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.norm(F.relu(self.conv1(x), inplace=True)))
        x = F.adaptive_avg_pool2d(F.relu_(self.conv2(x)), (2, 2))
        return self.fc(self.drop(torch.flatten(x, 1)))


class BasicBlock(nn.Module):
    def __init__(self, i: int, o: int, s: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, s, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(o)
        down = nn.Sequential(nn.Conv2d(i, o, 1, s, bias=False), nn.BatchNorm2d(o))
        self.down = down if s != 1 or i != o else None

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.down is None else self.down(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += skip
        return self.relu(out)


def resnet() -> nn.Module:
    return nn.Sequential(cbr(3, 16), BasicBlock(16, 16), BasicBlock(16, 32, 2), BasicBlock(32, 32), Head(32))


def resnext() -> nn.Module:
    return nn.Sequential(cbr(3, 16), BasicBlock(16, 32, 2, groups=8), BasicBlock(32, 32, groups=8), Head(32))


class PreActBlock(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(c), nn.Conv2d(c, c, 3, 1, 1)
        self.bn2, self.conv2 = nn.BatchNorm2d(c), nn.Conv2d(c, c, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.bn1(x)))
        return x.add(self.conv2(self.bn2(y).relu_()))


def preact() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1), PreActBlock(16), nn.AvgPool2d(2), PreActBlock(16), Head(16)
    )


class DenseBlock(nn.Module):
    def __init__(self, c: int, growth: int, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([cbr(c + i * growth, growth) for i in range(n)])

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, dim=1)


def densenet() -> nn.Module:
    return nn.Sequential(
        cbr(3, 8), DenseBlock(8, 4, 3), cbr(20, 10, 1), nn.AvgPool2d(2), DenseBlock(10, 4, 2), Head(18)
    )


class Inception(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.a = cbr(c, 8, 1)
        self.b = nn.Sequential(
            nn.Conv2d(c, 8, (1, 7), padding=(0, 3)), nn.Conv2d(8, 8, (7, 1), padding=(3, 0))
        )
        self.c = nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.Conv2d(c, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        pool = F.max_pool2d(x, 3, stride=1, padding=1)
        return torch.cat((self.a(x), self.b(x), self.c(x), pool), 1)


def inception() -> nn.Module:
    return nn.Sequential(cbr(3, 8, 3, 2), Inception(8), Inception(32), Head(56))


class SqueezeExcite(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(c, c // 4), nn.ReLU(), nn.Linear(c // 4, c), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        return x * self.fc(x.mean((2, 3))).view(b, c, 1, 1).expand_as(x)


def senet() -> nn.Module:
    return nn.Sequential(cbr(3, 16, s=2), SqueezeExcite(16), BasicBlock(16, 16), SqueezeExcite(16), Head(16))


class Inverted(nn.Module):
    def __init__(self, c: int, act: type[nn.Module] = nn.ReLU6, drop: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            cbr(c, 4 * c, 1, act=act),
            cbr(4 * c, 4 * c, 3, 1, 4 * c, act),
            nn.Conv2d(4 * c, c, 1),
            nn.BatchNorm2d(c),
        )
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.drop and self.training:
            keep = torch.rand(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device) + (1 - self.drop)
            y = y / (1 - self.drop) * keep.floor()
        return x + y


def mobilenet_v1() -> nn.Module:
    return nn.Sequential(
        cbr(3, 8, s=2), cbr(8, 8, 3, 1, 8), cbr(8, 16, 1), cbr(16, 16, 3, 2, 16), cbr(16, 32, 1), Head(32)
    )


def mobilenet_v2() -> nn.Module:
    return nn.Sequential(cbr(3, 8, s=2, act=nn.ReLU6), Inverted(8), Inverted(8), Head(8))


def mobilenet_v3() -> nn.Module:
    return nn.Sequential(
        cbr(3, 8, s=2, act=nn.Hardswish), Inverted(8, nn.Hardswish), SqueezeExcite(8), Head(8)
    )


def efficientnet() -> nn.Module:
    return nn.Sequential(cbr(3, 8, s=2, act=nn.SiLU), Inverted(8, nn.SiLU, 0.2), SqueezeExcite(8), Head(8))


class ShuffleUnit(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        half = c // 2
        self.branch = nn.Sequential(cbr(half, half, 1), cbr(half, half, 3, 1, half), cbr(half, half, 1))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        x = torch.cat((a, self.branch(b)), dim=1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)


def shufflenet() -> nn.Module:
    return nn.Sequential(cbr(3, 16, s=2), ShuffleUnit(16), nn.ChannelShuffle(4), ShuffleUnit(16), Head(16))


class Fire(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.squeeze, self.e1, self.e3 = nn.Conv2d(c, 4, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).clamp(min=0)
        return torch.cat([F.relu(self.e1(x)), F.relu(self.e3(x))], 1)


def squeezenet() -> nn.Module:
    return nn.Sequential(cbr(3, 16, s=2), Fire(16), nn.MaxPool2d(3, 2, ceil_mode=True), Fire(16), Head(16))


class Cell(nn.Module):
    """A cell of a searched network: two inputs, every node sums two operations, all nodes joined."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.pre0, self.pre1 = cbr(c, 8, 1), cbr(c, 8, 1)
        self.ops = nn.ModuleDict(
            {
                "sep": cbr(8, 8, 5, g=8),
                "dil": nn.Conv2d(8, 8, 3, padding=2, dilation=2),
                "avg": nn.AvgPool2d(3, 1, 1),
            }
        )

    def forward(self, s0: Tensor, s1: Tensor) -> Tensor:
        s0, s1 = self.pre0(s0), self.pre1(s1)
        states = [s0, s1]
        for name in ("sep", "dil", "avg"):
            states.append(self.ops[name](states[-1]) + states[-2])
        return torch.cat(states[2:], 1)


class NasNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cell1, self.cell2, self.head = cbr(3, 24, s=2), Cell(24), Cell(24), Head(24)

    def forward(self, x: Tensor) -> Tensor:
        s0 = s1 = self.stem(x)
        s0, s1 = s1, self.cell1(s0, s1)
        s0, s1 = s1, self.cell2(s0, s1)
        return self.head(s1)


class UNet(nn.Module):
    def __init__(self, up: str) -> None:
        super().__init__()
        self.d1, self.d2, self.d3 = cbr(3, 8), cbr(8, 16), cbr(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2) if up == "transposed" else nn.Conv2d(32, 16, 1)
        self.u2, self.u1, self.out = cbr(32, 16), cbr(24, 8), nn.Conv2d(8, 2, 1)
        self.mode = up

    def forward(self, x: Tensor) -> Tensor:
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.up(self.d3(F.max_pool2d(b, 2)))
        if self.mode != "transposed":
            c = F.interpolate(c, size=b.shape[2:], mode="bilinear", align_corners=True)
        c = self.u2(torch.cat([b, c], 1))
        c = F.interpolate(c, size=a.shape[-2:], mode="nearest")
        return self.out(self.u1(torch.cat([a, c], dim=1)))


class AttentionUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.gate, self.out = (
            cbr(3, 8),
            cbr(8, 8),
            nn.Conv2d(8, 1, 1),
            nn.Conv2d(8, 3, 1),
        )
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.up(self.deep(F.avg_pool2d(skip, 2)))
        return self.out(skip * torch.sigmoid(self.gate(skip + deep)) + deep)


class DeepLab(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = cbr(3, 16, s=2)
        self.branches = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=r, dilation=r) for r in (1, 2, 4)])
        self.image = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 8, 1), nn.ReLU())
        self.out = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.stem(x)
        size = y.shape[-2:]
        parts = [branch(y) for branch in self.branches]
        parts.append(F.interpolate(self.image(y), size=size, mode="bilinear", align_corners=False))
        y = self.out(torch.cat(parts, 1))
        return {"out": F.interpolate(y, scale_factor=2, mode="bilinear"), "low": y}


class PSPNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = cbr(3, 8)
        self.pools = nn.ModuleList(
            [nn.Sequential(nn.AdaptiveAvgPool2d(n), nn.Conv2d(8, 4, 1)) for n in (1, 2, 3)]
        )
        self.out = nn.Conv2d(20, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        h, w = y.size()[2:]
        return self.out(
            torch.cat([y] + [F.interpolate(p(y), (h, w), mode="bilinear") for p in self.pools], 1)
        )


class HRNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.high, self.low = cbr(3, 8), cbr(8, 8), cbr(8, 16, s=2)
        self.to_low, self.to_high = nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        high, low = self.high(x), self.low(x)
        up = F.interpolate(self.to_high(low), size=high.shape[2:], mode="bicubic", align_corners=False)
        return torch.relu(high + up), torch.relu(low + self.to_low(high))


class FPN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = cbr(3, 8, s=2), cbr(8, 16, s=2)
        self.l1, self.l2, self.smooth = nn.Conv2d(8, 8, 1), nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        a = self.c1(x)
        b = self.c2(a)
        p2 = self.l2(b)
        p1 = self.l1(a) + F.interpolate(p2, size=a.shape[2:])
        return {"levels": [self.smooth(p1), self.smooth(p2)]}


class SegNet(nn.Module):
    """Pooling with indices, which are positions in the whole image: those two layers stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = cbr(3, 16), cbr(16, 3)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y, indices = self.pool(self.enc(x))
        return self.dec(self.unpool(y, indices))


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(3, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(16, 8, 3, 2, 1, output_padding=1, groups=2), nn.PReLU(8),
        nn.Conv2d(8, 3, 3, 1, 1), nn.Tanh(),
    )  # fmt: skip


def espcn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2), nn.Tanh(), nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2)
    )


def style() -> nn.Module:
    return nn.Sequential(
        nn.ReflectionPad2d(4), nn.Conv2d(3, 8, 9), nn.InstanceNorm2d(8, affine=True), nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1, padding_mode="circular"), nn.InstanceNorm2d(16), nn.ELU(),
        nn.ReplicationPad2d(1), nn.Conv2d(16, 3, 3), nn.Upsample(scale_factor=2),
    )  # fmt: skip


class ConvNeXtBlock(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.dw, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c)
        self.up, self.act, self.down = nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c)
        self.gamma = nn.Parameter(0.1 * torch.ones(c))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dw(x).permute(0, 2, 3, 1)
        y = self.gamma * self.down(self.act(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 4), nn.GroupNorm(1, 16), ConvNeXtBlock(16), ConvNeXtBlock(16), Head(16)
    )


class NonLocal(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Conv2d(c, c, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (f(x).reshape(b, c, h * w) for f in (self.q, self.k, self.v))
        attention = torch.softmax(q.transpose(1, 2) @ k, dim=-1)
        return x + self.out(torch.bmm(v, attention.mT).view(b, c, h, w))


class CBAM(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 7, padding=3)
        self.c = c

    def forward(self, x: Tensor) -> Tensor:
        best = torch.max(x, dim=1, keepdim=True)[0]
        y = torch.cat([x.mean(1, keepdim=True), best], 1)
        return x * self.conv(y).sigmoid() + x.amax((2, 3), keepdim=True)


class BlurPool(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("kernel", (row[:, None] * row[None, :]).expand(c, 1, 3, 3).clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), self.kernel, stride=2, groups=x.shape[1])


def antialiased() -> nn.Module:
    return nn.Sequential(cbr(3, 8), BlurPool(8), CBAM(8), BlurPool(8), Head(8))


class CoordConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(5, 8, 3, padding=1), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        ys = torch.linspace(-1, 1, h, device=x.device).view(1, 1, h, 1).expand(b, 1, h, w)
        xs = torch.arange(w, device=x.device, dtype=x.dtype)[None, None, None, :].expand(b, 1, h, w) / w
        return self.head(self.conv(torch.cat([x, xs, ys], dim=1)))


class MixConv(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.sizes = [c // 2, c // 4, c // 4]
        self.convs = nn.ModuleList(
            [nn.Conv2d(n, n, k, padding=k // 2, groups=n) for n, k in zip(self.sizes, (3, 5, 7), strict=True)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([f(y) for f, y in zip(self.convs, torch.split(x, self.sizes, 1), strict=False)], 1)


def mixnet() -> nn.Module:
    return nn.Sequential(cbr(3, 16, s=2), MixConv(16), cbr(16, 16, 1), MixConv(16), Head(16))


class Ghost(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.primary, self.cheap, self.o = cbr(i, o // 2, 1), cbr(o // 2, o // 2, 3, 1, o // 2), o

    def forward(self, x: Tensor) -> Tensor:
        a = self.primary(x)
        return torch.cat([a, self.cheap(a)], 1)[:, : self.o - 1]


def ghostnet() -> nn.Module:
    return nn.Sequential(cbr(3, 8, s=2), Ghost(8, 16), Ghost(15, 16), Head(15))


class RepVGG(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Conv2d(c, c, 3, 1, 1), nn.BatchNorm2d(c)), nn.Conv2d(c, c, 1)
        self.identity = nn.BatchNorm2d(c)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.a(x) + self.b(x) + self.identity(x))


class Highway(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.h, self.t = nn.Conv2d(c, c, 3, padding="same"), nn.Conv2d(c, c, 3, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        t = self.t(x).sigmoid()
        return torch.where(t > 0.5, self.h(x) * t + x * (1 - t), x)


class Recurrent(nn.Module):
    """One module called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.step, self.head = cbr(3, 8), cbr(8, 8), Head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = x + self.step(x)
        return self.head(x)


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 3, 3, 2, 1, 1)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


def weight_normed() -> nn.Module:
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
    return nn.Sequential(conv, nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3)), Head(8))


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(cbr(3, 8, s=2), cbr(8, 8, s=2))
        self.head = nn.Linear(8, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = self.trunk(left).mean(dim=[2, 3]), self.trunk(right).mean(dim=[2, 3])
        return self.head(torch.abs(a - b)).squeeze(1)


class Block3d(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(c, c, 3, padding=1), nn.BatchNorm3d(c)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


def c3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool3d((1, 2, 2)), Block3d(8), nn.AvgPool3d(2),
        Block3d(8), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


class VNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.down, self.b = nn.Conv3d(1, 4, 5, padding=2), nn.Conv3d(4, 8, 2, 2), Block3d(8)
        self.up, self.out = nn.ConvTranspose3d(8, 4, 2, 2), nn.Conv3d(8, 2, 1)
        self.drop = nn.Dropout3d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.elu(self.a(x)) + x.repeat(1, 4, 1, 1, 1)
        b = self.up(self.drop(self.b(self.down(a))))
        return F.log_softmax(self.out(torch.cat([a, b], 1)), dim=1)


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, 8, 1)
        self.dilated = nn.ModuleList([nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3)])
        self.skip = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(3)])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, (dilated, skip) in enumerate(zip(self.dilated, self.skip, strict=True)):
            gate, value = dilated(F.pad(x, (2**i, 0))).chunk(2, 1)
            x = x + skip(torch.tanh(value) * torch.sigmoid(gate))
        return F.interpolate(F.max_pool1d(self.norm(x), 2), scale_factor=2.0, mode="linear")


class ViT(nn.Module):
    """A vision transformer on torch's own attention module."""

    def __init__(self, c: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, c, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, c))
        self.position = nn.Parameter(torch.randn(1, 17, c))
        self.block = nn.TransformerEncoderLayer(c, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(c, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        return self.head(self.block(x)[:, 0])


class Attention(nn.Module):
    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(c, 3 * c), nn.Linear(c, c), heads

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        assert c % self.heads == 0, "heads"
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, n, c))


class DeiT(nn.Module):
    def __init__(self, c: int = 16) -> None:
        super().__init__()
        self.patch, self.n1, self.n2 = nn.Conv2d(3, c, 8, 8), nn.LayerNorm(c), nn.LayerNorm(c)
        self.attention = Attention(c, 4)
        self.mlp = nn.Sequential(nn.Linear(c, 32), nn.GELU(), nn.Linear(32, c))
        self.head = nn.Linear(c, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.attention(self.n1(x))
        x = x + self.mlp(self.n2(x))
        return self.head(x.mean(dim=1))


class Mixer(nn.Module):
    def __init__(self, c: int = 16) -> None:
        super().__init__()
        self.patch, self.tokens, self.channels = nn.Conv2d(3, c, 8, 8), nn.Linear(16, 16), nn.Linear(c, c)
        self.norm = nn.LayerNorm(c)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("bchw->bhwc", self.patch(x)).flatten(1, 2)
        x = x + self.tokens(self.norm(x).mT).mT
        return (x + self.channels(self.norm(x))).mean(1)


class Window(nn.Module):
    """Swin-like: windows by view and permute, shifted by roll; decides by the size."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.patch, self.attention, self.w = nn.Conv2d(3, c, 4, 4), Attention(c, 2), 4

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        if h % self.w or w % self.w:
            x = F.pad(x, (0, 0, 0, (self.w - w % self.w) % self.w, 0, (self.w - h % self.w) % self.w))
        _, hp, wp, _ = x.shape
        x = torch.roll(x, shifts=(-2, -2), dims=(1, 2))
        x = x.view(b, hp // self.w, self.w, wp // self.w, self.w, c).permute(0, 1, 3, 2, 4, 5)
        y = self.attention(x.reshape(-1, self.w * self.w, c))
        y = y.view(b, hp // self.w, wp // self.w, self.w, self.w, c).permute(0, 1, 3, 2, 4, 5)
        return y.reshape(b, hp, wp, c)[:, :h, :w].mean((1, 2))


PAIR: tuple[Shape, Shape] = ((2, 3, 16, 16), (2, 3, 16, 16))
MODELS: dict[str, Case] = {
    "lenet": fixed(lenet),
    "alexnet": images(AlexNet, 48),
    "resnet": images(resnet),
    "resnext": images(resnext),
    "preact": images(preact),
    "densenet": images(densenet),
    "inception": images(inception),
    "senet": images(senet),
    "mobilenet_v1": images(mobilenet_v1),
    "mobilenet_v2": images(mobilenet_v2),
    "mobilenet_v3": images(mobilenet_v3),
    "efficientnet": images(efficientnet),
    "shufflenet": images(shufflenet),
    "squeezenet": images(squeezenet),
    "nasnet": images(NasNet),
    "unet_transposed": images(lambda: UNet("transposed")),
    "unet_bilinear": Case(
        lambda: UNet("bilinear"), ((2, 3, 33, 37),), (((1, 3, 30, 41),), ((3, 3, 32, 32),))
    ),
    "attention_unet": images(AttentionUNet),
    "deeplab": images(DeepLab),
    "pspnet": images(PSPNet),
    "hrnet": images(HRNet),
    "fpn": images(FPN),
    "segnet": images(SegNet),
    "generator": images(generator, 8),
    "espcn": images(espcn, 16),
    "style": images(style),
    "convnext": images(convnext),
    "nonlocal": images(lambda: nn.Sequential(cbr(3, 8, s=4), NonLocal(8), Head(8))),
    "antialiased": images(antialiased),
    "coordconv": images(CoordConv),
    "mixnet": images(mixnet),
    "ghostnet": images(ghostnet),
    "repvgg": images(lambda: nn.Sequential(cbr(3, 8), RepVGG(8), RepVGG(8), Head(8))),
    "highway": images(lambda: nn.Sequential(cbr(3, 8), Highway(8), Highway(8), Head(8))),
    "recurrent": images(Recurrent),
    "tied": images(TiedAutoencoder),
    "weight_normed": images(weight_normed, 16),
    "siamese": Case(Siamese, PAIR, (((1, 3, 20, 16),) * 2, ((3, 3, 16, 24),) * 2)),
    "c3d": volumes(c3d),
    "vnet": volumes(VNet),
    "wavenet": signals(WaveNet),
    "vit": fixed(ViT, known=0.0),
    "deit": images(DeiT, known=0.0),
    "mixer": fixed(Mixer),
    "window": Case(Window, ((2, 3, 32, 32),), (((1, 3, 48, 32),), ((3, 3, 64, 32),)), known=0.0),
}
