"""MPI moves messages only while somebody calls it: pipelines do so between their computations."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from ranks import run_ranks
from shardwise.training.trainer import Trainer


def drives_of_a_step(plan: str) -> tuple[bool, int, int]:
    """Train one step; return whether computations drive messages, how often, and how many there are."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 2, 3, padding=1) if i % 2 else nn.ReLU() for i in range(8)]
    x = torch.randn(4, 2, 8, 8)
    trainer = Trainer(nn.Sequential(*layers), (x, x), plan, loss=nn.functional.mse_loss, optimizer=_sgd)
    trainer.step(x, x)
    engine, calls = trainer.engine(((4, 2, 8, 8), (4, 2, 8, 8))), []
    drive = engine.between
    engine.between = (lambda: calls.append(drive())) if drive is not None else None
    trainer.step(x, x)
    stages = {id(stage): stage for stage in engine.stages.values()}.values()
    return drive is not None, len(calls), sum(len(stage.program.ops) for stage in stages)


def _sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


@pytest.mark.parametrize(
    ("transport", "plan", "drives"),
    [
        ("mpi4py", "stages=2 micro_batches=2", True),
        ("mpi4py", "spatial=2x1", False),
        ("gloo", "stages=2 micro_batches=2", False),
    ],
)
def test_in_pipelines_over_mpi_messages_advance_between_computations(
    transport: str, plan: str, drives: bool
) -> None:
    for driven, calls, ops in run_ranks(drives_of_a_step, 2, transport, (plan,)):
        assert driven == drives
        # Two micro-batches forwards, and the gradients of the parameters on the way back.
        assert calls > 2 * ops if drives else calls == 0
