"""Models in 16 bits: sums over many pixels neither overflow nor stop growing, whoever takes them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import run_ranks
from shardwise.training.trainer import Trainer


class Scaled(nn.Module):
    """One weight, an image and its mean: in float16 the sum of its pixels is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.75))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y + y.mean((2, 3), keepdim=True)


class Normed(nn.Module):
    """A batch norm of values far from zero, where a mean in 16 bits is off by more than their spread."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


CASES = {
    "a mean and a loss over many pixels": (Scaled, torch.float16, torch.ones(1, 1, 512, 512)),
    "statistics of batch norm": (Normed, torch.bfloat16, 100.0 + torch.randn(2, 2, 64, 64).round()),
}


def trained(name: str, plan: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of one step in 16 bits."""
    make, dtype, x = CASES[name]
    model, image = make().to(dtype), x.to(dtype)
    trainer = Trainer(model, (image, torch.zeros_like(image)), plan, loss=F.mse_loss)
    return trainer.step(image, torch.zeros_like(image)), trainer.gradients()


@pytest.mark.parametrize("name", list(CASES))
def test_sums_in_16_bits_are_those_of_32(name: str) -> None:
    make, dtype, x = CASES[name]
    # The images themselves are rounded once; everything after that is compared with 32 bits.
    model, image = copy.deepcopy(make()), x.to(dtype).float()
    value = F.mse_loss(model(image), torch.zeros_like(image))
    value.backward()
    for loss, grads in run_ranks(trained, 2, args=(name, "spatial=2x1")):
        assert loss == pytest.approx(float(value.detach()), rel=2e-2)
        for key, parameter in model.named_parameters():
            scale = max(1.0, float(parameter.grad.abs().max()))
            assert (grads[key].float() - parameter.grad).abs().max() <= 2e-2 * scale, key
