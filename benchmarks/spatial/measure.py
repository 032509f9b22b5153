"""The rank side: ours, the bound and one process in turns."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from turns import Step, in_turns, write

import shardwise as sw


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


def on_first_rank(step: Step, threads: int) -> Step:
    """Let rank 0 alone work, with so many threads; the other one sleeps."""

    def run() -> None:
        if dist.get_rank() == 0:
            torch.set_num_threads(threads)
            step()
            torch.set_num_threads(1)

    return run


class Meet(torch.autograd.Function):
    """Let both ranks wait for each other in both passes, as exact batch norm does, and nothing else."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.zeros(1))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.zeros(1))
        return grad


def meeting(model: nn.Module) -> nn.Module:
    """Let the ranks meet behind every batch norm of a model."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda _module, _inputs, out: Meet.apply(out))
    return model


VARIANTS = {
    "spatial=2x1": ("spatial=2x1", "auto"),
    "spatial=2x1, overlap backward": ("spatial=2x1", "backward"),
    "spatial=2x1, overlap both": ("spatial=2x1", "both"),
    "spatial=2x1 halo=fused": ("spatial=2x1 halo=fused", "auto"),
}


def main() -> None:
    case, (repeats, count, brief), target = sys.argv[1], map(int, sys.argv[2:5]), sys.argv[5]
    variants = dict(list(VARIANTS.items())[: count or None])
    sw.init()
    torch.set_num_threads(1)
    model, x, y = make(case)
    half = x.shape[2] // 2
    part = y if y.ndim == 1 else y[:, :half].contiguous()
    top = x[:, :, :half].contiguous()
    steps: dict[str, Step] = {
        "bound": plain(make(case)[0], top, part),
        "meeting": plain(meeting(make(case)[0]), top, part),
    }
    for name, (plan, overlap) in variants.items():
        trainer = sw.Trainer(
            make(case)[0], (x, y), plan, loss=F.cross_entropy, optimizer=sgd, overlap=overlap
        )
        steps[name] = lambda t=trainer: t.step(x, y)
    alone = plain(model, x, y)
    steps["one"], steps["two"] = on_first_rank(alone, 1), on_first_rank(alone, 2)
    # What one process could do too, if its user asked torch for it.
    if not brief:
        last = torch.channels_last
        turned = plain(make(case)[0].to(memory_format=last), x.contiguous(memory_format=last), y)
        steps["one last"], steps["two last"] = on_first_rank(turned, 1), on_first_rank(turned, 2)
        half_turned = top.contiguous(memory_format=last)
        steps["bound last"] = plain(make(case)[0].to(memory_format=last), half_turned, part)
    # Two images of 1024 x 1024 leave no room for what all kinds of steps keep between their turns.
    tidy = bool(count) and x.numel() > x.shape[1] * 1024**2
    write(target, {**in_turns(steps, repeats, tidy=tidy), "variants": list(variants)})
    sw.finalize()


if __name__ == "__main__":
    main()
