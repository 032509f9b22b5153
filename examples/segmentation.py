"""Segment images with a U-Net; masks have pixels that do not count, and still every plan gives one loss.

python examples/segmentation.py                              one process
python examples/segmentation.py "spatial=2x1"                two tiles
python examples/segmentation.py "data=2 stages=2 micro_batches=2"
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import shardwise as sw

IGNORED = 255


class Discs(Dataset):
    """Bright discs on noise; a border around each disc is not labelled."""

    def __init__(self, samples: int, size: int = 32) -> None:
        self.samples, self.size = samples, size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        cy, cx = (torch.rand(2, generator=generator) * self.size).tolist()
        radius = 4 + 6 * float(torch.rand(1, generator=generator))
        y, x = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        distance = ((y - cy) ** 2 + (x - cx) ** 2).sqrt()
        image = torch.randn(3, self.size, self.size, generator=generator) * 0.3 + (distance < radius)
        mask = (distance < radius).long()
        mask[(distance - radius).abs() < 1.5] = IGNORED
        return image, mask


def overlap(output: Tensor, mask: Tensor) -> Tensor:
    """Return intersection over union of the discs, among the pixels that count."""
    found, wanted, counts = output.argmax(1) == 1, mask == 1, mask != IGNORED
    return (found & wanted & counts).sum() / ((found | wanted) & counts).sum().clamp(min=1)


def main(plan: str = "data=1", epochs: int = 3, samples: int = 48) -> sw.History:
    torch.manual_seed(0)
    model = sw.zoo.build("unet", num_classes=2, base=8, depth=2)
    history = sw.fit(
        model,
        Discs(samples),
        loss=nn.CrossEntropyLoss(ignore_index=IGNORED),
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=3e-3),
        batch_size=8,
        epochs=epochs,
        plan=plan,
        ranks=sw.Plan.parse(plan).ranks,
        validation=Discs(16),
        metrics=[overlap],
    )
    print(history)
    return history


if __name__ == "__main__":
    main(*sys.argv[1:2])
