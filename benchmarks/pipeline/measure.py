"""The rank side: ours and torch's pipelines in turns, cut at the same layer."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from turns import Step, in_turns, write

import shardwise as sw

MICRO_BATCHES = 8


def sgd(named: object) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.001, momentum=0.9)


def chain() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 3, padding=1), nn.ReLU()]
    for _ in range(10):
        layers += [nn.Conv2d(48, 48, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


class Half(nn.Module):
    """A part of a ResNet as one module for torch's pipeline."""

    def __init__(self, model: nn.Module, first: bool) -> None:
        super().__init__()
        blocks = [block for layer in (model.layer1, model.layer2, model.layer3) for block in layer]
        cut = len(blocks) // 2
        self.first = first
        self.blocks = nn.Sequential(*(blocks[:cut] if first else blocks[cut:]))
        if first:
            self.conv1, self.bn1 = model.conv1, model.bn1
        else:
            self.model_tail = nn.ModuleList([model.post_bn, model.fc])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            return self.blocks(F.relu(self.bn1(self.conv1(x))))
        norm, fc = self.model_tail
        return fc(F.relu(norm(self.blocks(x))).mean((2, 3)))


def build(name: str) -> tuple[nn.Module, list[nn.Module], str, torch.Tensor]:
    """Return the model, its two halves for torch, the name of the layer where ours cuts, and a batch."""
    torch.manual_seed(0)
    if name == "chain":
        model = chain()
        cut = 12
        halves = [nn.Sequential(*model[:cut]), nn.Sequential(*model[cut:])]
        return model, halves, str(cut), torch.randn(16, 3, 64, 64)
    model = sw.zoo.build(name)
    blocks = [(f"layer{i}", j) for i in (1, 2, 3) for j in range(len(getattr(model, f"layer{i}")))]
    layer, index = blocks[len(blocks) // 2]
    graph = sw.capture(model, torch.randn(2, 3, 32, 32))
    first = next(item.name for item in graph if item.name.startswith(f"{layer}.{index}."))
    return model, [Half(model, True), Half(model, False)], first, torch.randn(32, 3, 32, 32)


def torch_step(half: nn.Module, schedule: type, x: torch.Tensor, y: torch.Tensor) -> Step:
    rank = dist.get_rank()
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    runner = schedule(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)
    optimizer = sgd(half.named_parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            runner.step(x)
        else:
            runner.step(target=y, losses=[])
        optimizer.step()

    return step


def main() -> None:
    name, repeats, target = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    sw.init()
    torch.set_num_threads(1)
    rank = dist.get_rank()
    _, _, cut, x = build(name)
    y = torch.randint(0, 10, (len(x),))
    steps: dict[str, Step] = {}
    for schedule in ("gpipe", "1f1b", "zero-bubble"):
        plan = f"stages=2 schedule={schedule} micro_batches={MICRO_BATCHES} cuts={cut}"
        trainer = sw.Trainer(build(name)[0], (x, y), plan, loss=F.cross_entropy, optimizer=sgd)
        steps[schedule] = lambda t=trainer: t.step(x, y)
    for label, schedule in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        steps[f"torch {label}"] = torch_step(build(name)[1][rank], schedule, x, y)
    write(target, in_turns(steps, repeats))
    sw.finalize()


if __name__ == "__main__":
    main()
