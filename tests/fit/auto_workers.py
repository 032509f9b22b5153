"""What the ranks of the tests of `plan="auto"` do."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.runtime.calibrate.crew import crew
from shardwise.runtime.calibrate.job import measure

# A rank loads this file by its path, so its neighbours are not on the way of imports yet.
sys.path.append(str(Path(__file__).parent))
import fit_cases as cases


def doubled(number: int) -> int:
    """Be measured."""
    return 2 * number + sw.init().rank


def measured_by_the_job(module: str) -> list[int] | None:
    """Return what rank 0 learns from all ranks of the job, twice."""
    with crew() as leads:
        if leads:
            settings = {"size": 9, "transport": "none of these", "seconds": 0.0}
            return [n for k in (10, 20) for n in measure(f"{module}:doubled", k, **settings)]
    return None


def chosen(machine: str, norm: bool) -> tuple[sw.History, float]:
    """Train under auto; return the history, and how far the weights are from those of one device."""
    model, whole = cases.classifier(norm=norm), cases.classifier(norm=norm)
    x, y = cases.images(16)
    settings = {"loss": F.cross_entropy, "optimizer": cases.sgd, "batch_size": 4, "progress": False}
    history = sw.fit(
        model, TensorDataset(x, y), machine=machine, profile_seconds=0.0, shuffle=False, **settings
    )
    optimizer = cases.sgd(whole.named_parameters())
    for start in range(0, 16, 4):
        optimizer.zero_grad()
        F.cross_entropy(whole(x[start : start + 4]), y[start : start + 4]).backward()
        optimizer.step()
    return history, cases.error(model.state_dict(), whole.state_dict())


def lopsided() -> nn.Module:
    """All operations in front, all bytes behind."""
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    front = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*front, *(nn.Tanh() for _ in range(8)), *head).double()


def settled(machine: str, plan: str) -> str:
    """Train under a plan that leaves something open; return what it became."""
    settings = {"loss": F.cross_entropy, "optimizer": cases.sgd, "batch_size": 4, "progress": False}
    data = TensorDataset(*cases.images(8))
    model = lopsided() if "stages" in plan else cases.classifier(norm=False)
    return sw.fit(model, data, plan=plan, machine=machine, **settings).plan


def refused(machine: str) -> str:
    """Return what every rank is told when nothing fits."""
    try:
        chosen(machine, False)
    except ValueError as error:
        return str(error)
    return ""
