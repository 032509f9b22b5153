"""Two ranks train; in the second step one stops or sleeps in front of its forward pass."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.program import Act
from shardwise.runtime.engine import Engine


def main() -> None:
    how, plan = sys.argv[1], " ".join(sys.argv[2:])
    session = sw.init()
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2, 2, 3, padding=1),
        nn.Flatten(),
        nn.Linear(128, 3),
    )
    x, y = torch.randn(2, 1, 8, 8), torch.tensor([0, 2])
    trainer = sw.Trainer(model, (x, y), plan, loss=F.cross_entropy, optimizer=sgd)
    trainer.step(x, y)
    if session.rank == (0 if how == "freeze" else 1):
        misbehave_in(trainer.engine(((2, 1, 8, 8), (2,))), how)
    print(f"pid {os.getpid()} at {time.time():.3f}", flush=True)
    trainer.step(x, y)
    print("finished", flush=True)


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)  # type: ignore[attr-defined]


def misbehave_in(engine: Engine, how: str) -> None:
    def forward(*_: object) -> None:
        if how in ("stop", "freeze"):
            # Time to publish what it does; nothing is heard of it afterwards.
            time.sleep(0.6)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)

    engine.run = {**engine.run, Act.FORWARD: forward}


if __name__ == "__main__":
    main()
