"""The rank side: ours and one kind of DDP in turns, so that only two states of the model are alive."""

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


class Ours:
    """One trainer that steps with overlap or without, and notes how long each step waits at its end."""

    def __init__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        plan = f"data={dist.get_world_size()} batch_norm=local"
        self.trainer = sw.Trainer(model, (x, y), plan, loss=F.cross_entropy, optimizer=sgd)
        self.batch = x, y
        self.waits: dict[bool, list[float]] = {True: [], False: []}
        self.reducer = self.trainer.bench.reducer
        self.usual, self.finish = self.reducer.early, self.reducer.finish

    def step(self, overlap: bool) -> None:
        # With or without: what overlap is worth.
        self.reducer.early = overlap
        self.reducer.finish = lambda: self._finish(overlap)
        self.trainer.step(*self.batch)

    def _finish(self, overlap: bool) -> None:
        start = time.perf_counter()
        self.finish()
        self.waits[overlap].append(time.perf_counter() - start)


def main() -> None:
    name, target = sys.argv[1], sys.argv[5]
    repeats, pixels, views = (int(word) for word in sys.argv[2:5])
    sw.init()
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    settings = {"dropout": 0.0} if name == "vgg16" else {}

    def make() -> nn.Module:
        torch.manual_seed(0)
        return sw.zoo.build(name, **settings)

    x, y = torch.randn(BATCH * size, 3, pixels, pixels), torch.randint(0, 1000, (BATCH * size,))
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    ours = Ours(make(), x, y)
    steps: dict[str, Step] = {
        "early": lambda: ours.step(True),
        "ddp": ddp(make(), x[mine], y[mine], views=bool(views)),
        "late": lambda: ours.step(False),
    }
    found = in_turns(steps, repeats)
    found["ours"] = found["early" if ours.usual else "late"]
    for label, overlap in (("exposed early", True), ("exposed late", False)):
        found[label] = statistics.median(ours.waits[overlap][1:])
    write(target, found)
    sw.finalize()


if __name__ == "__main__":
    main()
