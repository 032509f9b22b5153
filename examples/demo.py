"""See the whole of shardwise in two minutes: look at a network, ask the oracle, train it, compare.

    python examples/demo.py

The model is a small U-Net on 128 x 128 images. This machine is measured briefly, several ways to split a
step over two ranks are predicted, the fastest one is run for real on two ranks, and what was predicted
stands beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import shardwise as sw
from shardwise.graph import capture_loss
from shardwise.graph.attach import attach
from shardwise.oracle.kernels import Roofline, Task
from shardwise.oracle.profile import Profile
from shardwise.program import Compute, Normalise
from shardwise.program.lowered import lower
from shardwise.runtime.calibrate import profile_kernels

PLANS = (
    "data=2",
    "spatial=2x1",
    "spatial=2x1 halo=fused",
    "filter=2",
    "stages=2 schedule=layer",
    "stages=2 schedule=1f1b micro_batches=4",
    "stages=2 schedule=gems-mast",
)
BATCH, PIXELS, STEPS = 4, 128, 12


def model_and_batch() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the network and one mini-batch: images with a bright disc, and the mask of the disc."""
    torch.manual_seed(0)
    y, x = torch.meshgrid(torch.arange(PIXELS), torch.arange(PIXELS), indexing="ij")
    centres = torch.randint(PIXELS // 4, 3 * PIXELS // 4, (BATCH, 2, 1, 1))
    masks = ((y - centres[:, 0]) ** 2 + (x - centres[:, 1]) ** 2 < (PIXELS // 6) ** 2).long()
    images = torch.randn(BATCH, 3, PIXELS, PIXELS) * 0.5 + masks.unsqueeze(1)
    return sw.zoo.build("unet", base=16, depth=3), images, masks


def sgd(named: object) -> torch.optim.Optimizer:
    """Make the optimizer."""
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


def train(plan: str, target: Path) -> None:
    """Run on every rank: train for some steps and write down how it went."""
    model, images, masks = model_and_batch()
    trainer = sw.Trainer(model, (images, masks), plan, loss=F.cross_entropy, optimizer=sgd)
    losses, seconds = [], []
    for step in range(STEPS):
        start = time.perf_counter()
        losses.append(trainer.step(images, masks))
        seconds.append(time.perf_counter() - start)
        if trainer.session.rank == 0:
            print(f"step {step + 1:2d}/{STEPS}  loss {losses[-1]:.4f}  {seconds[-1]:.3f} s", flush=True)
    if trainer.session.rank == 0:
        target.write_text(json.dumps({"losses": losses, "seconds": seconds}))


def ask(console: Console, budget: float) -> list[tuple[str, sw.Prediction]]:
    """Measure this machine, then predict every plan; fastest first."""
    model, images, masks = model_and_batch()
    network = sw.capture(model, images)
    console.print(network.table(), soft_wrap=True)
    graph = attach(network, capture_loss(F.cross_entropy, network.output_specs, masks))
    console.rule("measuring this machine")
    machine = sw.calibrate(seconds=budget / 3, quiet=not console.is_terminal)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    profile = Profile(machine.device.name, threads, Roofline(machine.device))
    tasks = []
    for plan in PLANS:
        lowered = lower(graph, sw.Plan.parse(plan))
        for stage in range(len(lowered.plan.stages)):
            program = lowered.stage(stage, 0, 0)
            computes = [op for op in program.ops if isinstance(op, (Compute, Normalise))]
            tasks += [Task.of(op, rank) for op in computes for rank in range(program.width)]
    left = profile_kernels(profile, tasks, seconds=budget * 2 / 3)
    console.print(f"{len(profile.entries)} kernels measured, {len(left)} to be scaled from similar ones")
    found = [(plan, sw.predict(graph, plan, machine, kernels=profile)) for plan in PLANS]
    return sorted(found, key=lambda pair: pair[1].step_seconds)


def main() -> None:
    """Tell the story on one process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=45.0, help="time for measuring the machine")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.target)
        return
    console = Console()
    console.rule("the network")
    ranking = ask(console, options.seconds)
    table = Table("plan", "step", "samples/s", "peak memory of a rank", title="predicted for two ranks")
    for plan, prediction in ranking:
        table.add_row(
            plan,
            f"{prediction.step_seconds * 1e3:.0f} ms",
            f"{prediction.samples_per_second:.1f}",
            f"{prediction.peak_bytes / 2**20:.0f} MiB",
        )
    console.print(table)
    plan, prediction = ranking[0]
    console.print(prediction.bottleneck)
    console.rule(f"training on two ranks: {plan}")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "run.json"
        command = [sys.executable, "-m", "shardwise.cli", "run", "-n", "2", __file__]
        subprocess.run([*command, "--train", plan, "--target", str(target)], check=True)
        run = json.loads(target.read_text())
    measured = statistics.median(run["seconds"][2:])
    accuracy = 1 - abs(prediction.step_seconds - measured) / measured
    console.rule("predicted and measured")
    console.print(
        f"step: predicted {prediction.step_seconds * 1e3:.0f} ms, measured {measured * 1e3:.0f} ms "
        f"(median of {STEPS - 2}), accuracy {accuracy:.0%}; "
        f"loss {run['losses'][0]:.3f} -> {run['losses'][-1]:.3f}"
    )


if __name__ == "__main__":
    main()
