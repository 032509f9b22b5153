"""Give every model of the zoo the same, sensible starting weights."""

import torch
from torch import nn

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def kaiming(model: nn.Module, negative_slope: float = 0.0) -> None:
    """Draw convolution and dense weights after He et al. (2015) and zero their biases.

    Args:
        model: the model whose parameters are set in place; it may live on the meta device.
        negative_slope: slope of the leaky rectifier behind the layers; 0 means a plain rectifier.
    """
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            nn.init.kaiming_normal_(module.weight, a=negative_slope, mode="fan_out")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, a=negative_slope)
        else:
            continue
        if isinstance(module.bias, torch.Tensor):
            nn.init.zeros_(module.bias)
