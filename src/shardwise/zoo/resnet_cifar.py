"""ResNet for small images, as in the Keras CIFAR-10 example that HyPar-Flow trains.

Version 1 (basic blocks) has depth 6n + 2, version 2 (pre-activated bottlenecks) depth 9n + 2. Convolutions
carry biases even before a normalisation, because that is what the published counts contain:

=============  =================  ==========================
model          parameters         with running statistics
=============  =================  ==========================
ResNet-20 v1   273,066            274,442
ResNet-1001v2  30,347,658         30,539,498 (the "30.5 M")
=============  =================  ==========================

The global average pool accepts any image size, so the same networks run at 224 pixels and above.
"""

from torch import Tensor, nn

from ._init import kaiming


def blocks_per_stage(depth: int, version: int) -> int:
    """Return n for a depth of 6n + 2 (version 1) or 9n + 2 (version 2)."""
    if version not in (1, 2):
        raise ValueError(f"ResNet version is {version}; it can be 1 or 2")
    layers = 6 if version == 1 else 9
    count, rest = divmod(depth - 2, layers)
    if count < 1 or rest:
        nearest = layers * max(1, round((depth - 2) / layers)) + 2
        raise ValueError(
            f"ResNet v{version} for small images has depth {layers}n + 2; found {depth}, nearest is {nearest}"
        )
    return count


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)


class BasicBlock(nn.Module):
    """Add two 3x3 convolutions to their input (version 1)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = _conv(outputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else _conv(inputs, outputs, 1, stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the rectified sum of the residual and the shortcut."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu2(self.shortcut(x) + y)
        return out


class PreActivationBottleneck(nn.Module):
    """Add a pre-activated 1x1, 3x3, 1x1 bottleneck to its input (version 2).

    The stride sits in the first convolution and the shortcut reads the raw input. The very first block
    follows a stem that has already normalised and rectified, and does not do it again.
    """

    def __init__(
        self, inputs: int, width: int, outputs: int, stride: int, first: bool, project: bool
    ) -> None:
        super().__init__()
        self.bn1 = nn.Identity() if first else nn.BatchNorm2d(inputs)
        self.relu1 = nn.Identity() if first else nn.ReLU()
        self.conv1 = _conv(inputs, width, 1, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv2 = _conv(width, width, 3)
        self.bn3 = nn.BatchNorm2d(width)
        self.relu3 = nn.ReLU()
        self.conv3 = _conv(width, outputs, 1)
        self.shortcut = _conv(inputs, outputs, 1, stride) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the residual and the shortcut."""
        y = self.conv1(self.relu1(self.bn1(x)))
        y = self.conv2(self.relu2(self.bn2(y)))
        y = self.conv3(self.relu3(self.bn3(y)))
        out: Tensor = self.shortcut(x) + y
        return out


class CifarResNet(nn.Module):
    """Classify small images with a residual network of three stages.

    Args:
        depth: 6n + 2 for version 1 (20, 56, 110 ...), 9n + 2 for version 2 (56, 110, 164, 1001 ...).
        version: 1 for basic blocks, 2 for pre-activated bottlenecks.
        num_classes: outputs of the classifier.
        in_channels: channels of the image.
        width: filters of the stem (16 as published).
    """

    def __init__(
        self,
        depth: int = 110,
        version: int = 2,
        num_classes: int = 10,
        in_channels: int = 3,
        width: int = 16,
    ) -> None:
        super().__init__()
        repeats = blocks_per_stage(depth, version)
        self.conv1 = _conv(in_channels, width, 3)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        channels = width
        stages = []
        for stage in range(3):
            # A bottleneck stage is as wide inside as what it receives: 16 -> 64, 64 -> 128, 128 -> 256.
            inner = channels
            outputs = width * 2**stage * (1 if version == 1 else 4)
            blocks: list[nn.Module] = []
            for index in range(repeats):
                stride = 2 if stage > 0 and index == 0 else 1
                if version == 1:
                    blocks.append(BasicBlock(channels, outputs, stride))
                else:
                    first = stage == 0 and index == 0
                    block = PreActivationBottleneck(
                        channels, inner, outputs, stride, first, project=index == 0
                    )
                    blocks.append(block)
                channels = outputs
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3 = stages
        self.post_bn = nn.BatchNorm2d(channels) if version == 2 else nn.Identity()
        self.post_relu = nn.ReLU() if version == 2 else nn.Identity()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, num_classes)
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = self.avgpool(self.post_relu(self.post_bn(x)))
        out: Tensor = self.fc(self.flatten(x))
        return out
