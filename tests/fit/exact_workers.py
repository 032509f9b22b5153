"""What ranks do in the tests of models, losses and optimizers that only some splits leave exact."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw

# A rank loads this file by its path, so its neighbours are not on the way of imports yet.
sys.path.append(str(Path(__file__).parent))
import fit_cases as cases


class Centred(nn.Module):
    """Subtract the mean of all samples, as batch norm without its sums over replicas would."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.last(torch.tanh(x - x.mean((0, 2, 3), keepdim=True)))


def mixed(plan: str) -> float | str:
    """Return how far a network that mixes samples is from one device, or why it is refused."""
    torch.manual_seed(0)
    split = Centred().double()
    whole = copy.deepcopy(split)
    x = cases.images(4)[0]
    y = torch.zeros(4, 4, 10, 10, dtype=torch.float64)
    try:
        trainer = sw.Trainer(split, (x, y), plan, loss=F.mse_loss)
    except sw.PlanError as error:
        return str(error)
    found = trainer.step(x, y)
    wanted = F.mse_loss(whole(x), y)
    wanted.backward()
    grads = {name: p.grad for name, p in whole.named_parameters()}
    return max(abs(found - float(wanted)), cases.error(trainer.gradients(), grads))
