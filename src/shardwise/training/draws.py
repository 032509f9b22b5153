"""Random draws of a dataset that are the same on every rank which reads the same sample.

Transforms draw from the generators of their process. Two ranks that read one sample, one for its image and
one for its label, or each for its own tile, have to find those generators in one state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_draws(*key: int) -> None:
    """Let draws from torch, random and NumPy follow from some numbers."""
    # Hashes of numbers are the same in every process; NumPy and torch take 32 bits of a seed. The CPU's
    # generator alone, since `torch.manual_seed` takes longer than many a sample.
    seed = hash(key) & 0xFFFFFFFF
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def kept_draws() -> Iterator[None]:
    """Let the generators go on as if nothing had been drawn meanwhile."""
    # NumPy takes as long to copy its state as ten samples do; it goes on from a seed of its own instead.
    states = torch.default_generator.get_state(), random.getstate(), np.random.bytes(4)
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.seed(int.from_bytes(states[2], "little"))
