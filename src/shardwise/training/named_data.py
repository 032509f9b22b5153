"""Data by name for the command line: scikit-learn's digits, or noise of any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from shardwise.graph import TensorSpec


def input_shape(name: str) -> tuple[int, ...]:
    """Return channels and sizes of the images that a name stands for."""
    if name == "digits":
        return (3, 8, 8)
    kind, _, sizes = name.partition(":")
    parts = sizes.split("x")
    if kind != "synthetic" or len(parts) < 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"data: found {name!r}; expected digits, or synthetic:3x512x512")
    return tuple(int(part) for part in parts)


def named_data(name: str, output: TensorSpec, samples: int) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return training and test data for a network with this output.

    Args:
        name: `digits` or `synthetic:<channels>x<height>x<width>`.
        output: shape of what the network returns; its second dimension is the number of classes, and what
            follows are the sizes of the masks.
        samples: how many synthetic samples to make.
    """
    shape = input_shape(name)
    if name == "digits":
        return _digits()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((samples, *shape), generator=generator)
    y = torch.randint(0, output.shape[1], (samples, *output.shape[2:]), generator=generator)
    data = TensorDataset(x, y)
    held_out = max(1, samples // 8)
    return Subset(data, range(samples - held_out)), Subset(data, range(samples - held_out, samples))


def _digits() -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the 1,797 handwritten digits of scikit-learn, three equal channels each; 540 are for tests."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError("data: digits come from scikit-learn; run: pip install scikit-learn") from error
    found = load_digits()
    images: Tensor = torch.tensor(found.images / 16.0, dtype=torch.float32)
    x = images[:, None].expand(-1, 3, -1, -1).contiguous()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    data, held_out = TensorDataset(x[order], torch.tensor(found.target)[order]), 540
    return Subset(data, range(held_out, len(x))), Subset(data, range(held_out))
