"""What rank 0 says, on every rank."""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch

from shardwise.runtime.fabric import Fabric

T = TypeVar("T")


def told(value: T, fabric: Fabric, device: torch.device) -> T:
    """Return rank 0's value on every rank; collective over the world."""
    if fabric.size == 1:
        return value
    # A sum to which the others add zeros: it waits under the eyes of the heartbeat, over every transport.
    words = pickle.dumps(value) if fabric.rank == 0 else b""
    length = torch.tensor([len(words)], device=device)
    fabric.world.all_reduce(length)
    content = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if words:
        content.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint8))
    fabric.world.all_reduce(content)
    result: T = pickle.loads(bytes(content.tolist()))
    return result
