"""Run real training steps of many plans in turn on local ranks: how long they take, what memory they need."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.commands.subject import build_model


@dataclass(frozen=True)
class Subject:
    """A network to validate on: its name, the shape of a sample, and the mini-batch."""

    name: str
    shape: tuple[int, ...]
    batch: int


@dataclass(frozen=True)
class Trial:
    """One network under one plan."""

    subject: Subject
    plan: str


@dataclass(frozen=True)
class Measurement:
    """What the ranks measured: the median step, half its interquartile range, bytes of the fullest rank."""

    seconds: float
    spread: float
    peak_bytes: int
    high_water_bytes: int


def measure_trials(
    trials: Sequence[Trial], ranks: int, transport: str, repeats: int, deadline: float = 1800.0
) -> list[Measurement | str]:
    """Run trials of one number of ranks in turn, so that a slow moment of the machine hits all alike.

    Returns one measurement per trial, or the words of the error that refused it.
    """
    from shardwise.runtime.calibrate.job import measure

    found = measure(
        f"{__name__}:run_trials", (list(trials), repeats), size=ranks, transport=transport, seconds=deadline
    )
    results: list[Measurement | str] = []
    for parts in zip(*found, strict=True):
        bad = [part for part in parts if isinstance(part, str)]
        results.append(bad[0] if bad else _together(parts))
    return results


def _together(parts: Sequence[Any]) -> Measurement:
    """Take the slowest rank of every repeat, and the fullest rank."""
    steps = [max(times) for times in zip(*(part["seconds"] for part in parts), strict=True)]
    quarters = statistics.quantiles(steps, n=4) if len(steps) > 1 else [steps[0]] * 3
    return Measurement(
        statistics.median(steps),
        (quarters[2] - quarters[0]) / 2,
        max(part["peak"] for part in parts),
        max(part["high_water"] for part in parts),
    )


def run_trials(arguments: Any) -> list[Any]:
    """Be one rank: prepare all trials, then step through them in turn."""
    import torch.distributed as dist

    from shardwise.plan import PlanError
    from shardwise.runtime.memory import measure_peak

    trials, repeats = arguments
    results: list[Any] = []
    steps = []
    for trial in trials:
        try:
            steps.append(_prepare(trial))
            results.append({"seconds": [], "peak": 0, "high_water": 0})
        except (PlanError, ValueError) as error:
            # All ranks are refused alike: the plan is checked before anything is sent.
            steps.append(None)
            results.append(str(error))
    for step, result in zip(steps, results, strict=True):
        if step is not None:
            step()
            peak = measure_peak(step)
            result["peak"], result["high_water"] = peak.bytes, peak.high_water_bytes
    for _ in range(repeats):
        for step, result in zip(steps, results, strict=True):
            if step is not None:
                if dist.is_initialized():
                    dist.barrier()
                start = time.perf_counter()
                step()
                result["seconds"].append(time.perf_counter() - start)
    return results


def _prepare(trial: Trial) -> Any:
    import torch

    from shardwise.training.trainer import Trainer

    subject = trial.subject
    torch.manual_seed(0)
    model = build_model(subject.name, device=None).train()
    x = torch.randn(subject.batch, *subject.shape)
    with torch.no_grad():
        out = model(x)
    loss, target = loss_for(out.shape)
    y = target()
    trainer = Trainer(model, (x, y), trial.plan, loss=loss, optimizer=sgd)
    return lambda: trainer.step(x, y)


def loss_for(shape: Sequence[int]) -> tuple[Any, Any]:
    """Return a loss that suits an output of this shape, and a callable that makes a target for it."""
    import torch

    if len(shape) >= 2 and shape[1] > 1:
        size = (shape[0], *shape[2:])
        return torch.nn.CrossEntropyLoss(), lambda: torch.randint(shape[1], size)
    return torch.nn.MSELoss(), lambda: torch.randn(*shape)


def sgd(named: Any) -> Any:
    """Make the optimizer of all trials."""
    import torch

    return torch.optim.SGD([p for _, p in named], lr=0.01, momentum=0.9)
