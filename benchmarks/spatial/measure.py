"""The rank side: time ours, the bound and one process in turns, and let rank 0 write the medians."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise as sw

Step = Callable[[], object]


def make(case: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    name, pixels, batch = case.split(":")
    size, count = int(pixels), int(batch)
    torch.manual_seed(0)
    if name.startswith("unet"):
        model = sw.zoo.build("unet", base=32, batch_norm=name == "unet")
        target = torch.randint(0, 2, (count, size, size))
    else:
        model = sw.zoo.build(name)
        target = torch.randint(0, 1000, (count,))
    return model, torch.randn(count, 3, size, size), target


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.01, momentum=0.9)


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    optimizer = sgd(model.named_parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def main() -> None:
    case, repeats, target, plans = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    sw.init()
    torch.set_num_threads(1)
    rank = dist.get_rank()
    model, x, y = make(case)
    # Every rank runs these steps at the same time; nobody waits for anybody inside.
    joint: dict[str, Step] = {}
    half = x.shape[2] // 2
    part = y if y.ndim == 1 else y[:, :half].contiguous()
    joint["bound"] = plain(make(case)[0], x[:, :, :half].contiguous(), part)
    for plan in plans:
        trainer = sw.Trainer(make(case)[0], (x, y), plan, loss=F.cross_entropy, optimizer=sgd)
        joint[plan] = lambda t=trainer: t.step(x, y)
    alone = plain(model, x, y)
    times: dict[str, list[float]] = {name: [] for name in (*joint, "one", "two")}
    for repeat in range(repeats + 1):
        for name, step in joint.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if repeat:
                times[name].append(time.perf_counter() - start)
        for name, threads in (("one", 1), ("two", 2)):
            dist.barrier()
            if rank == 0:
                torch.set_num_threads(threads)
                start = time.perf_counter()
                alone()
                if repeat:
                    times[name].append(time.perf_counter() - start)
                torch.set_num_threads(1)
            dist.barrier()
    medians = {name: statistics.median(found) if found else 0.0 for name, found in times.items()}
    # A step ends when the slower rank ends.
    gathered: list[dict[str, float]] = [{} for _ in range(2)]
    dist.all_gather_object(gathered, medians)
    if rank == 0:
        slowest = {name: max(found[name] for found in gathered) for name in medians}
        target.write_text(json.dumps(slowest))
    sw.finalize()


if __name__ == "__main__":
    main()
