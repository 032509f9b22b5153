"""The networks of the papers, as plain torch modules, by name."""

from .amoebanet import AmoebaNetD
from .cosmoflow import CosmoFlow
from .registry import build, example, input_shape, names
from .resnet import ResNet
from .resnet_cifar import CifarResNet
from .unet import UNet
from .vgg import VGG16

__all__ = [
    "VGG16",
    "AmoebaNetD",
    "CifarResNet",
    "CosmoFlow",
    "ResNet",
    "UNet",
    "build",
    "example",
    "input_shape",
    "names",
]
