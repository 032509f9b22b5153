"""Losses on tiles, samples and channels equal the loss on one device: their counts are global."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rules_harness import check, loss_subject, run_whole
from torch import Tensor, nn

SHAPE = (3, 2, 9, 11)
PLANS = ("spatial=2", "spatial=1x3", "spatial=2x2", "filter=2", "batch=2", "spatial=2 tail=replicate")


def classes(out: Tensor) -> Tensor:
    return torch.randint(0, out.shape[1], (out.shape[0], *out.shape[2:]))


def uneven(out: Tensor) -> Tensor:
    """Leave one tile without any pixel that counts."""
    target = classes(out)
    target[:, : out.shape[2] // 2] = 1
    target[0] = 2
    return target


def likely(out: Tensor) -> Tensor:
    return torch.softmax(torch.randn_like(out), 1)


def between(out: Tensor) -> Tensor:
    return torch.rand_like(out)


def dice(out: Tensor, target: Tensor) -> Tensor:
    p, t = torch.softmax(out, 1), F.one_hot(target, out.shape[1]).movedim(-1, 1).to(out.dtype)
    overlap = (p * t).sum((0, 2, 3))
    return 1 - ((2 * overlap + 1) / (p.sum((0, 2, 3)) + t.sum((0, 2, 3)) + 1)).mean()


def dice_on_masks(out: Tensor, target: Tensor) -> Tensor:
    p = torch.sigmoid(out)
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


def masked_mean(out: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(out, target, reduction="none")
    mask = (target != 0).to(out.dtype)
    return (each * mask).sum() / mask.sum().clamp(min=1)


def weighted(out: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, target, pos_weight=torch.tensor(3.0, dtype=out.dtype))


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25], dtype=torch.float64)

LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "cross-entropy": (F.cross_entropy, classes),
    "cross-entropy ignoring": (nn.CrossEntropyLoss(ignore_index=1), uneven),
    "cross-entropy weighted": (nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1), uneven),
    "cross-entropy smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2, weight=WEIGHT), classes),
    "cross-entropy of probabilities": (nn.CrossEntropyLoss(label_smoothing=0.1), likely),
    "cross-entropy summed": (nn.CrossEntropyLoss(reduction="sum"), classes),
    "nll": (lambda out, y: F.nll_loss(F.log_softmax(out, 1), y, ignore_index=1), uneven),
    "mse": (F.mse_loss, torch.randn_like),
    "mse by weights": (lambda out, y: F.mse_loss(out, y, weight=y.abs()), torch.randn_like),
    "l1 by weights": (lambda out, y: F.l1_loss(out, y, weight=y.square()), torch.randn_like),
    "huber by weights": (lambda out, y: F.huber_loss(out, y, weight=y.square()), torch.randn_like),
    "l1": (F.l1_loss, torch.randn_like),
    "huber": (nn.HuberLoss(delta=0.5), torch.randn_like),
    "smooth l1": (nn.SmoothL1Loss(beta=0.3), torch.randn_like),
    "bce": (lambda out, y: F.binary_cross_entropy(torch.sigmoid(out), y), between),
    "bce with logits": (F.binary_cross_entropy_with_logits, between),
    "bce with pos_weight": (weighted, between),
    "bce with pos_weight per class": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT.view(4, 1, 1)), between),
    "bce with weight": (nn.BCEWithLogitsLoss(weight=WEIGHT.view(4, 1, 1)), between),
    "kl": (lambda out, y: F.kl_div(F.log_softmax(out, 1), y, reduction="batchmean"), likely),
    "kl of logs": (
        lambda out, y: F.kl_div(F.log_softmax(out, 1), y.log(), reduction="sum", log_target=True),
        likely,
    ),
    "dice": (dice, classes),
    "dice on masks": (dice_on_masks, between),
    "masked mean": (masked_mean, uneven),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_loss_on_parts_equals_loss(name: str) -> None:
    loss, target = LOSSES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1)).double()
    x = torch.randn(SHAPE, dtype=torch.float64)
    with torch.no_grad():
        y = target(model(x))
    it = loss_subject(model, loss, x, y)
    owner = copy.deepcopy(model)
    expected = run_whole(it, lambda a, b: loss(owner(a), b), owner)
    # Buffers of the loss are compared with nothing, and targets need no gradient here.
    expected = {k: v for k, v in expected.items() if not k.startswith(("buffer", "input loss"))}
    check(it, expected, PLANS)


def test_classifier_loss_by_samples_equals_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)).double()
    x, y = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([1, 3, 0])
    it = loss_subject(model, nn.CrossEntropyLoss(ignore_index=3), x, y)
    owner = copy.deepcopy(model)
    expected = run_whole(it, lambda a, b: F.cross_entropy(owner(a), b, ignore_index=3), owner)
    check(it, {k: v for k, v in expected.items() if not k.startswith("buffer")}, PLANS)
