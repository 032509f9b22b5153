"""ResNet for ImageNet: v1 (He et al., 2015) and v2 with pre-activation (He et al., 2016).

Version 1 is the layout of torchvision, with the stride of a bottleneck in its 3x3 convolution, and the
state_dict keys are the same.
"""

from torch import Tensor, nn

from ._init import kaiming

STAGES: dict[int, tuple[int, int, int, int]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
"""Residual blocks per stage, by depth."""

_BASIC_DEPTHS = (18, 34)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class BasicBlock(nn.Module):
    """Add two 3x3 convolutions to their input."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = _conv(width, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = _projection(inputs, outputs, stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the rectified sum of the residual and the shortcut."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu2(y + self.downsample(x))
        return out


class Bottleneck(nn.Module):
    """Add a 1x1, 3x3, 1x1 bottleneck to its input."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _projection(inputs, outputs, stride)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the rectified sum of the residual and the shortcut."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        out: Tensor = self.relu3(y + self.downsample(x))
        return out


class PreActivationBlock(nn.Module):
    """Normalise and rectify before each convolution, and leave the sum untouched.

    A projecting shortcut reads the rectified input, an identity shortcut the raw one.
    """

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.projects = stride != 1 or inputs != outputs
        self.downsample = _conv(inputs, outputs, 1, stride) if self.projects else nn.Identity()
        convs = (
            [_conv(inputs, width, 1), _conv(width, width, 3, stride), _conv(width, outputs, 1)]
            if bottleneck
            else [_conv(inputs, width, 3, stride), _conv(width, outputs, 3)]
        )
        layers: list[nn.Module] = [convs[0]]
        for conv in convs[1:]:
            layers += [nn.BatchNorm2d(conv.in_channels), nn.ReLU(), conv]
        self.residual = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the residual and the shortcut."""
        y = self.relu1(self.bn1(x))
        shortcut = self.downsample(y if self.projects else x)
        out: Tensor = self.residual(y) + shortcut
        return out


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Classify images with an ImageNet-style residual network.

    Args:
        depth: 18, 34, 50, 101 or 152.
        version: 1 for post-activation, 2 for pre-activation blocks.
        num_classes: outputs of the classifier.
        in_channels: channels of the image.
        width: filters of the stem and of the first stage's inner convolutions (64 as published).
    """

    def __init__(
        self,
        depth: int = 50,
        version: int = 1,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
    ) -> None:
        super().__init__()
        if depth not in STAGES:
            raise ValueError(f"ResNet depth is {depth}; ImageNet-style depths are {sorted(STAGES)}")
        if version not in (1, 2):
            raise ValueError(f"ResNet version is {version}; it can be 1 or 2")
        basic = depth in _BASIC_DEPTHS
        expansion = 1 if basic else 4

        def block(inputs: int, inner: int, stride: int) -> nn.Module:
            if version == 2:
                return PreActivationBlock(inputs, inner, expansion * inner, stride, bottleneck=not basic)
            return (BasicBlock if basic else Bottleneck)(inputs, inner, expansion * inner, stride)

        self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
        # In version 2 the first block brings its own normalisation.
        self.bn1 = nn.BatchNorm2d(width) if version == 1 else nn.Identity()
        self.relu = nn.ReLU() if version == 1 else nn.Identity()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        stages = []
        for stage, repeats in enumerate(STAGES[depth]):
            inner = width * 2**stage
            blocks = []
            for index in range(repeats):
                blocks.append(block(channels, inner, stride=2 if stage > 0 and index == 0 else 1))
                channels = expansion * inner
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.post_bn = nn.BatchNorm2d(channels) if version == 2 else nn.Identity()
        self.post_relu = nn.ReLU() if version == 2 else nn.Identity()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, num_classes)
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = self.avgpool(self.post_relu(self.post_bn(x)))
        out: Tensor = self.fc(self.flatten(x))
        return out
