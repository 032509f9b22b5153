"""Add a small value of a loss up over data replicas, and its gradient on the way back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardwise.program import Normalise
from shardwise.runtime.wire import Pending, Wire


@dataclass
class Saved:
    """What tells the shape of a gradient that nobody made."""

    x: Tensor


class ReplicaSum:
    """One rank's part: replicas that hold the same box of a value add it up.

    A mean is weighted with its part of the samples. The gradient of the loss is seeded with the same parts,
    so the sum of all replicas' gradients is that of the one loss they share.
    """

    crop = None

    def __init__(self, op: Normalise, wire: Wire) -> None:
        self.wire = wire
        samples: int | None = op.layer.attributes["samples"]
        self.share = None if samples is None else samples / op.samples

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        """Return the value over all replicas."""
        total = x.clone() if self.share is None else x * self.share
        self.wire.all_reduce(total)
        return total, Saved(x)

    def begin(self, saved: Saved, dy: Tensor, own: bool = True) -> tuple[Tensor, Pending]:
        """Start to add the gradients of all replicas up."""
        total = dy.clone()
        what = "gradient of a loss over replicas"
        return total, self.wire.start_all_reduce(total, what, in_turn=True)

    def end(self, under_way: tuple[Tensor, Pending]) -> Tensor:
        """Return the gradient of this replica's value."""
        total, pending = under_way
        pending.wait()
        return total if self.share is None else total.mul_(self.share)

    def backward(self, saved: Saved, dy: Tensor) -> Tensor:
        """Do both halves at once."""
        return self.end(self.begin(saved, dy))
