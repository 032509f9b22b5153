"""Bring what a user's data gives to the device that computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.graph.trace import transform


def moved(tree: Any, device: torch.device) -> Any:
    """Return a structure with all of its tensors on a device."""
    return transform(tree, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)
