"""See the whole of shardwise in two minutes: look at a network, ask the oracle, train it, compare.

    python examples/demo.py

The model is a small U-Net on 128 x 128 images. This machine is measured briefly, all ways to split a step
over two ranks are ranked, the best one is run for real on two ranks, and what was predicted stands beside
what was measured.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.graph import Graph, capture_loss
from shardwise.graph.attach import attach
from shardwise.training.auto import changes_numbers

BATCH, PIXELS, SAMPLES, EPOCHS, RANKS = 4, 128, 48, 3, 2


def discs() -> TensorDataset:
    """Return images with a bright disc, and the masks of the discs."""
    torch.manual_seed(0)
    y, x = torch.meshgrid(torch.arange(PIXELS), torch.arange(PIXELS), indexing="ij")
    centres = torch.randint(PIXELS // 4, 3 * PIXELS // 4, (SAMPLES, 2, 1, 1))
    masks = ((y - centres[:, 0]) ** 2 + (x - centres[:, 1]) ** 2 < (PIXELS // 6) ** 2).long()
    return TensorDataset(torch.randn(SAMPLES, 3, PIXELS, PIXELS) * 0.5 + masks.unsqueeze(1), masks)


def sgd(named: object) -> torch.optim.Optimizer:
    """Make the optimizer."""
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


def ask(console: Console, graph: Graph, machine: sw.Machine, seconds: float) -> None:
    """Rank every plan for two ranks that gives the numbers of one device, and say what limits the best."""
    ranking = sw.search(
        graph,
        machine,
        RANKS,
        BATCH,
        keep=8,
        all_ranks=True,
        profile_seconds=seconds,
        refuse=partial(changes_numbers, graph),
    )
    console.print(str(ranking), soft_wrap=True, highlight=False)
    console.print(f"{ranking.best.plan}: {ranking.best.bottleneck}", soft_wrap=True, highlight=False)


def compare(console: Console, history: sw.History) -> None:
    """Put what was predicted beside what the ranks measured."""
    for name, unit, scale in (("step_seconds", "ms per step", 1e3), ("step_bytes", "MB in a step", 1e-6)):
        guess, truth = history.predicted[name], history.measured[name]
        accuracy = 1 - abs(guess - truth) / truth
        console.print(
            f"predicted {guess * scale:.1f}, measured {truth * scale:.1f} {unit}: accuracy {accuracy:.0%}",
            highlight=False,
        )
    losses = history["loss"]
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {EPOCHS} epochs under {history.plan}")


def main() -> None:
    """Tell the story."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="time for measuring the machine")
    options = parser.parse_args()
    console, data = Console(), discs()
    model = sw.zoo.build("unet", base=16, depth=3)
    console.rule("the network")
    network = sw.capture(model, data.tensors[0][:BATCH])
    console.print(network.table(), soft_wrap=True)
    graph = attach(network, capture_loss(F.cross_entropy, network.output_specs, data.tensors[1][:BATCH]))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "here.toml"
        console.rule("measuring this machine")
        machine = sw.calibrate(here, seconds=options.seconds / 2, quiet=not console.is_terminal)
        console.print(str(machine), highlight=False)
        console.rule(f"all plans for {RANKS} ranks, best first")
        ask(console, graph, machine, options.seconds / 2)
        console.rule(f"training on {RANKS} ranks under the best plan")
        history = sw.fit(
            model,
            data,
            loss=F.cross_entropy,
            optimizer=sgd,
            batch_size=BATCH,
            epochs=EPOCHS,
            plan="auto",
            machine=here,
            profile_seconds=0.0,
            ranks=RANKS,
        )
    console.rule("predicted and measured")
    compare(console, history)


if __name__ == "__main__":
    main()
