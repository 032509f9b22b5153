"""Models, data and workers of the trainer's tests; every function runs on the ranks of a pool too."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.training.unsplit import unsplit_step


class Residual(nn.Module):
    """Two convolutions beside a skip."""

    def __init__(self, channels: int, norm: bool) -> None:
        super().__init__()
        # A bias before a batch norm has no gradient but rounding errors, which nothing can be compared with.
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.norm(self.conv1(x))))


def classifier(norm: bool = True, channels: int = 8) -> nn.Module:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)]
    body = [
        nn.Conv2d(3, channels, 3, padding=1),
        Residual(channels, norm),
        nn.ReLU(),
        Residual(channels, norm),
    ]
    return nn.Sequential(*body, *head).double()


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        Residual(6, True),
        nn.Conv2d(6, 4, 1),
    ).double()


def images(batch: int, size: int = 10, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, size, size, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 5, (batch,), generator=generator)


def masks(batch: int, size: int = 10, seed: int = 1) -> tuple[Tensor, Tensor]:
    x, _ = images(batch, size, seed)
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (batch, size, size), generator=generator)
    # Very uneven, so that a mean of means would be far from the mean.
    y[: batch // 2, : size - 2] = 255
    return x, y


class Tied(nn.Module):
    """One convolution twice, before and behind a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.shared = nn.Conv2d(6, 6, 3, padding=1)
        self.middle = nn.Conv2d(6, 6, 1).requires_grad_(False)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.middle(F.relu(self.shared(self.first(x)))))
        return self.head(self.shared(x).mean((2, 3)))


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double()


class Undecided(nn.Module):
    """Decide by the values of a tensor, so that nothing can trace it; two outputs in a dict."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.classes = nn.Linear(6, 5)
        self.size = nn.Linear(6, 1)

    def forward(self, image: Tensor, kind: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.norm(self.conv(image)))
        if float(x.detach().sum()) > 0:
            x = x.mean((2, 3))
        else:
            x = x.amax((2, 3))
        return {"classes": self.classes(x), "size": self.size(x) + kind.unsqueeze(1)}


def undecided(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Undecided(norm).double()


def first_norm() -> nn.Module:
    """Return a network whose one batch norm sees the same values however the mini-batch is cut."""
    torch.manual_seed(0)
    head = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), *head).double()


class TwoHeads(nn.Module):
    """Two inputs, one of whole numbers; two outputs in a dict; a whole number crosses between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.classes = nn.Linear(6, 5)
        self.size = nn.Linear(6, 1)

    def forward(self, image: Tensor, kind: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.conv1(image))
        x = F.relu(self.conv2(x)).mean((2, 3)) + self.table(kind)
        return {"classes": self.classes(x), "size": self.size(x)}


def two_heads() -> nn.Module:
    torch.manual_seed(0)
    return TwoHeads().double()


def paired(batch: int, size: int = 10, seed: int = 1) -> tuple[Any, Any]:
    x, y = images(batch, size, seed)
    kind = torch.randint(0, 7, (batch,), generator=torch.Generator().manual_seed(seed))
    return (x, kind), {"classes": y, "size": x.mean((1, 2, 3)).unsqueeze(1)}


def two_losses(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    error = F.mse_loss(output["size"], target["size"])
    return F.cross_entropy(output["classes"], target["classes"]) + 0.5 * error


def counted_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=255)


class Weighted(nn.Module):
    """A cross-entropy with class weights and a second term that is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([0.1, 1.0, 2.0, 5.0], dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        value = F.cross_entropy(output, target, self.weight, ignore_index=255)
        return value + 1e-3 * F.mse_loss(output, torch.zeros_like(output), reduction="sum")


def batch_dice(output: Tensor, target: Tensor) -> Tensor:
    inside, wanted = output.softmax(1)[:, 1], (target == 1).double()
    return 1 - 2 * (inside * wanted).sum() / (inside.sum() + wanted.sum() + 1.0)


def dice_and_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Per class sums over the batch, a factor from all targets, beside a mean over what counts."""
    counts = (target != 255).unsqueeze(1)
    wanted = F.one_hot(target.clamp(max=3), 4).permute(0, 3, 1, 2).double() * counts
    inside = output.softmax(1) * counts
    overlap, total = (inside * wanted).sum((0, 2, 3)), (inside + wanted).sum((0, 2, 3))
    dice = 1 - (2 * overlap + 1) / (total + 1)
    return dice.mean() + counted_loss(output, target) + inside.mean().log()


def scattered_dice(output: Tensor, target: Tensor) -> Tensor:
    """Targets put in their places by hand, of which no split knows the geometry."""
    wanted = torch.zeros_like(output).scatter_(1, target.clamp(max=3).unsqueeze(1), 1.0)
    inside = output.softmax(1)
    overlap, total = (inside * wanted).sum((0, 2, 3)), (inside + wanted).sum((0, 2, 3))
    return 1 - ((2 * overlap + 1) / (total + 1)).mean()


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def worst(*errors: float) -> float:
    """Return the largest error; one that is no number is infinite, while `max` would pass over it."""
    return max(float("inf") if math.isnan(error) else error for error in errors)


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the worst deviation relative to each tensor's largest value; infinite where one is missing."""
    if not wanted.keys() <= found.keys():
        return float("inf")
    floor = 1e-6 * worst(*(float(t.double().abs().max()) for t in wanted.values()))
    errors = []
    for name, b in wanted.items():
        scale = max(float(b.double().abs().max()), floor)
        errors.append(float((found[name].double() - b.double()).abs().max()) / scale)
    return worst(0.0, *errors)


def compare(
    model: Callable[[], nn.Module],
    data: Callable[..., tuple[Any, Any]],
    plan: str,
    batches: tuple[tuple[int, int], ...],
    loss: Callable[..., Tensor],
    options: dict[str, Any] | None = None,
) -> tuple[float, float, float]:
    """Train on mini-batches of the given (samples, size) under a plan and on one device, on every rank.

    Returns the worst deviation of the losses, of the gradients, and of all weights and statistics.
    """
    split, whole = model(), model()
    trainer = sw.Trainer(split, data(*batches[0]), plan, loss=loss, optimizer=sgd, **(options or {}))
    optimizer = sgd(whole.named_parameters())
    losses = gradients = 0.0
    for i, (batch, size) in enumerate(batches):
        x, y = data(batch, size, seed=i)
        found = trainer.step(x, y)
        optimizer.zero_grad()
        mean = (options or {}).get("loss_mean", "exact")
        wanted = float(unsplit_step(whole, loss, x, y, trainer.plan, mean))
        losses = worst(losses, abs(found - wanted) / max(abs(wanted), 1e-12))
        grads = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
        gradients = worst(gradients, error(trainer.gradients(), grads))
        optimizer.step()
    return losses, gradients, error(trainer.state_dict(), copy.deepcopy(whole.state_dict()))
