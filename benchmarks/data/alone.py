"""Compare `fit` on one process with a loop written by hand; both in turns, epochs of the same data."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw

BATCH, STEPS = 16, 6


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.001, momentum=0.9)


def by_hand(model: torch.nn.Module, data: TensorDataset, epochs: int) -> list[float]:
    """Return the seconds of each epoch."""
    optimizer = sgd(model.named_parameters())
    loader = DataLoader(data, BATCH, shuffle=True)
    model.train()
    seconds = []
    for _ in range(epochs):
        start, total = time.perf_counter(), 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        seconds.append(time.perf_counter() - start)
    return seconds


def by_fit(model: torch.nn.Module, data: TensorDataset, epochs: int) -> list[float]:
    """Return the seconds of each epoch."""
    settings = {"loss": F.cross_entropy, "optimizer": sgd, "batch_size": BATCH, "plan": "data=1"}
    return sw.fit(model, data, epochs=epochs, progress=False, **settings)["seconds"]


def main() -> None:
    name, repeats, target = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    x, y = torch.randn(BATCH * STEPS, 3, 32, 32), torch.randint(0, 10, (BATCH * STEPS,))
    data = TensorDataset(x, y)
    found: dict[str, list[float]] = {"by hand": [], "fit": []}
    for _ in range(repeats):
        for kind, run in (("by hand", by_hand), ("fit", by_fit)):
            torch.manual_seed(0)
            # The first epoch of each warms the allocator up.
            found[kind] += run(sw.zoo.build(name), data, 3)[1:]
    target.write_text(json.dumps({kind: statistics.median(times) / STEPS for kind, times in found.items()}))


if __name__ == "__main__":
    main()
