"""The rank side: the peak of one step, split or not, in a process that does nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from turns import write

import shardwise as sw
from shardwise.runtime.memory import high_water_bytes, measure_peak

Run = Callable[[bool], object]


def make(case: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    name, pixels, batch = case.split(":")
    size, count = int(pixels), int(batch)
    torch.manual_seed(0)
    if name == "unet":
        return (
            sw.zoo.build(name, base=32),
            torch.randn(count, 3, size, size),
            torch.randint(0, 2, (count, size, size)),
        )
    return sw.zoo.build(name), torch.randn(count, 3, size, size), torch.randint(0, 1000, (count,))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.01, momentum=0.9)


def alone(case: str) -> tuple[Run, int, Callable[[], int]]:
    """Return one device's step, the bytes of its data, and no communication buffers."""
    model, x, y = make(case)
    optimizer = sgd(model.named_parameters())

    def step(fresh: bool) -> None:
        optimizer.zero_grad(set_to_none=fresh)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step, x.nbytes + y.nbytes, lambda: 0


def split(case: str, plan: str) -> tuple[Run, int, Callable[[], int]]:
    """Return this rank's part of the step; it holds only what it needs of the data."""
    model, x, y = make(case)
    # Of two steps that make one update the second adds to gradients that are already there: they take turns.
    trainer = sw.Trainer(model, (x, y), plan, loss=F.cross_entropy, optimizer=sgd, accumulate=2)
    shapes = (tuple(x.shape), tuple(y.shape))
    parts = [(x, y)[need.input][need.box.slices()].clone() for need in trainer.needs(shapes)]
    del x, y

    def step(_: bool) -> None:
        trainer.step_local(shapes, parts)

    def buffers() -> int:
        engine = trainer.engine(shapes)
        sums = engine.reducer.buffer_bytes if engine.reducer is not None else 0
        return engine.buffer_bytes + sums

    return step, sum(part.nbytes for part in parts), buffers


def main() -> None:
    case, plan, target = sys.argv[1:4]
    sw.init()
    torch.set_num_threads(1)
    step, data, buffers = alone(case) if plan == "none" else split(case, plan)
    step(True)
    step(False)
    # The high-water mark first: the profiler of the measured steps needs memory of its own.
    mine = {"resident": high_water_bytes(), "data": data, "buffers": buffers()}
    mine["whole"] = measure_peak(lambda: step(True)).bytes
    mine["saved"] = measure_peak(lambda: step(False)).bytes
    ranks: list[dict[str, int]] = [mine]
    if dist.is_initialized():
        ranks = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(ranks, mine)
    write(target, {"ranks": ranks})
    sw.finalize()


if __name__ == "__main__":
    main()
