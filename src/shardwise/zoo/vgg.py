"""VGG16 (Simonyan and Zisserman, 2014, configuration D) with the keys of torchvision."""

from torch import Tensor, nn

from ._init import kaiming

_STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Width multiple and number of convolutions of each stage; a pool ends each."""


class VGG16(nn.Module):
    """Classify images with thirteen 3x3 convolutions and three dense layers.

    Args:
        num_classes: outputs of the classifier.
        in_channels: channels of the image.
        width: filters of the first stage (64 as published).
        hidden: features of the two hidden dense layers (4096 as published).
        pooled: side of the grid that the dense layers read (7 as published).
        dropout: probability with which a hidden feature is dropped in training.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        hidden: int = 4096,
        pooled: int = 7,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for multiple, convolutions in _STAGES:
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width * multiple, 3, padding=1), nn.ReLU()]
                channels = width * multiple
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(pooled)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Linear(channels * pooled**2, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        x = self.avgpool(self.features(x))
        out: Tensor = self.classifier(self.flatten(x))
        return out
