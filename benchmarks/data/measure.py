"""The rank side: ours and DDP in turns."""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from turns import Step, in_turns, write

import shardwise as sw

BATCH = 4


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.001, momentum=0.9)


def ddp(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, views: bool) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = sgd(model.named_parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    return step


def waiting(trainer: sw.Trainer) -> list[float]:
    """Return a list that every step adds to: how long it waited for gradients behind its last backward."""
    seconds: list[float] = []
    reducer = trainer.bench.reducer
    finish = reducer.finish

    def timed() -> None:
        start = time.perf_counter()
        finish()
        seconds.append(time.perf_counter() - start)

    reducer.finish = timed
    return seconds


def main() -> None:
    name, repeats, pixels, target = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    sw.init()
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    settings = {"dropout": 0.0} if name == "vgg16" else {}

    def make() -> nn.Module:
        torch.manual_seed(0)
        return sw.zoo.build(name, **settings)

    x, y = torch.randn(BATCH * size, 3, pixels, pixels), torch.randint(0, 1000, (BATCH * size,))
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    plan = f"data={size} batch_norm=local"
    trainer = sw.Trainer(make(), (x, y), plan, loss=F.cross_entropy, optimizer=sgd)
    late = sw.Trainer(make(), (x, y), plan, loss=F.cross_entropy, optimizer=sgd)
    # Nothing starts before backward ends: what overlap is worth.
    late.bench.reducer.ready = lambda name: None
    waits = {"exposed": waiting(trainer), "exposed late": waiting(late)}
    steps = {
        "ours": lambda: trainer.step(x, y),
        "ours late": lambda: late.step(x, y),
        "ddp": ddp(make(), x[mine], y[mine], views=False),
        "ddp views": ddp(make(), x[mine], y[mine], views=True),
    }
    found = in_turns(steps, repeats)
    write(target, found | {name: statistics.median(seconds[1:]) for name, seconds in waits.items()})
    sw.finalize()


if __name__ == "__main__":
    main()
