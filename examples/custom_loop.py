"""Your own training loop: a trainer, steps on global mini-batches, and everything else is yours.

python examples/custom_loop.py
shardwise run -n 4 examples/custom_loop.py "data=2 stages=2 micro_batches=2"
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import shardwise as sw


def batches(count: int, samples: int = 16):
    """Make the same mini-batches on every rank; each rank uses only its part of them."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randn(samples, 3, 32, 32, generator=generator)
        yield x, (x.mean((1, 2, 3)) > 0).long()


def main(plan: str = "data=1", steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    model = sw.zoo.build("resnet8", num_classes=2)
    example = next(batches(1))
    trainer = sw.Trainer(
        model,
        example,
        plan,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        clip_norm=1.0,
    )
    losses = []
    for step, (x, y) in enumerate(batches(steps)):
        losses.append(trainer.step(x, y))
        if trainer.session.rank == 0 and step % 5 == 0:
            print(f"step {step:3}  loss {losses[-1]:.4f}  gradient norm {trainer.gradient_norm:.3f}")
    x, y = example
    right = (trainer.predict(x).argmax(1) == y).double().mean()
    if trainer.session.rank == 0:
        print(f"accuracy on the first mini-batch {100 * float(right):.0f} %, plan {trainer.plan}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
