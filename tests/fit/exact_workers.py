"""What ranks do in the tests of models, losses and optimizers that only some splits leave exact."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

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
    y = torch.zeros(4, 4, 10, 10, dtype=torch.float64)
    return deviation(Centred().double(), cases.images(4)[0], y, plan, F.mse_loss)


def deviation(model: nn.Module, x: Tensor, y: Tensor, plan: str, loss: Any) -> float | str:
    """Return how far one step is from one device, or why the plan is refused."""
    whole = copy.deepcopy(model)
    try:
        trainer = sw.Trainer(model, (x, y), plan, loss=loss)
    except sw.PlanError as error:
        return str(error)
    found = trainer.step(x, y)
    wanted = loss(whole(x), y)
    wanted.backward()
    grads = {name: p.grad for name, p in whole.named_parameters()}
    return cases.worst(abs(found / float(wanted) - 1), cases.error(trainer.gradients(), grads))


def l1_sum(output: Tensor, target: Tensor) -> Tensor:
    return F.l1_loss(output, target, reduction="sum")


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def kl(output: Tensor, target: Tensor) -> Tensor:
    return F.kl_div(output, target, reduction="batchmean")


BROADCAST = {"l1 sum": l1_sum, "l1": F.l1_loss, "squares": squares, "kl": kl}


def broadcast_over_pixels(plan: str, loss: str) -> float | str:
    """Return how far a loss is from one device whose targets are one number per sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 1, 3, padding=1)).double()
    return deviation(model, cases.images(8)[0], torch.rand(8, 1, 1, 1).double(), plan, BROADCAST[loss])


def broadcast_over_samples(plan: str) -> float | str:
    """Return how far a loss is from one device that compares (n, 1) with (n,), or why it is refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(300, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return deviation(model, cases.images(8)[0], torch.rand(8).double(), plan, F.mse_loss)


def scaled_loss(output: Tensor, target: tuple[Tensor, Tensor, Any]) -> Tensor:
    """Mixup: two targets of each sample and the weight of the first."""
    first, second, weight = target
    one, other = (F.cross_entropy(output, y, reduction="none") for y in (first, second))
    return (weight * one + (1 - weight) * other).mean()


def mixed_up(plan: str, as_tensor: bool) -> float | str:
    """Return how far steps with a changing weight are from one device, or why one is refused."""
    split, whole = cases.classifier(norm=False), cases.classifier(norm=False)
    x, y = cases.images(4)
    targets = [(y, y.flip(0), torch.full((4,), w).double() if as_tensor else w) for w in (0.3, 0.9)]
    trainer = sw.Trainer(split, (x, targets[0]), plan, loss=scaled_loss)
    trainer.step(x, targets[0])
    try:
        found = trainer.step(x, targets[1])
    except ValueError as error:
        return str(error)
    wanted = scaled_loss(whole(x), targets[1])
    wanted.backward()
    grads = {name: p.grad for name, p in whole.named_parameters()}
    return cases.worst(abs(found - wanted.item()), cases.error(trainer.gradients(), grads))


def optimized(plan: str, name: str) -> float | str:
    """Return how far weights are from one device after steps of an optimizer, or why it is refused."""
    torch.manual_seed(0)
    split = nn.Sequential(nn.Flatten(), nn.Linear(300, 6, bias=False), nn.Tanh(), nn.Linear(6, 5, bias=False))
    split = split.double()
    whole = copy.deepcopy(split)
    kind = getattr(torch.optim, name)
    x, y = cases.images(4)
    try:
        trainer = sw.Trainer(
            split, (x, y), plan, loss=F.cross_entropy, optimizer=lambda named: kind([p for _, p in named])
        )
    except ValueError as error:
        return str(error)
    optimizer = kind(whole.parameters())
    for _ in range(3):
        trainer.step(x, y)
        optimizer.zero_grad()
        F.cross_entropy(whole(x), y).backward()
        optimizer.step()
    return cases.error(trainer.state_dict(), whole.state_dict())


def tracked_instances(plan: str) -> float:
    """Return how far weights and running statistics of instance norms are from one device."""
    torch.manual_seed(0)
    split = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.InstanceNorm2d(6, momentum=0.3, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(600, 5),
    ).double()
    whole = copy.deepcopy(split)
    trainer = sw.Trainer(split, cases.images(5), plan, loss=F.cross_entropy, optimizer=cases.sgd)
    optimizer = cases.sgd(whole.named_parameters())
    for seed in range(2):
        x, y = cases.images(5, seed=seed)
        trainer.step(x, y)
        optimizer.zero_grad()
        # Deferred statistics are those of the whole mini-batch.
        deferred = trainer.plan.batch_norm == "deferred"
        cases.unsplit_step(whole, F.cross_entropy, x, y, sw.Plan() if deferred else trainer.plan)
        optimizer.step()
    return cases.error(trainer.state_dict(), whole.state_dict())


def under_autocast(plan: str) -> float:
    """Take a step within autocast, whose layers make other numbers than were planned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(256, 5))
    x, y = cases.images(4)
    trainer = sw.Trainer(model, (x.float(), y), plan, loss=F.cross_entropy)
    with torch.autocast("cpu", torch.bfloat16):
        return trainer.step(x.float(), y)


class Unpooled(nn.Module):
    """Pool with the places of the largest, and put them back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x, places = self.pool(self.first(x))
        return self.last(self.unpool(torch.tanh(x), places))


def unpooled(plan: str) -> float | str:
    """Return how far a network with a layer of two results is from one device, or why a cut is refused."""
    torch.manual_seed(0)
    y = torch.zeros(4, 4, 10, 10, dtype=torch.float64)
    return deviation(Unpooled().double(), cases.images(4)[0], y, plan, F.mse_loss)
