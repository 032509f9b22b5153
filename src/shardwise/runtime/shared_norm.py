"""Batch norm whose statistics several ranks share, exactly.

Forward: every rank sums over the pixels it owns (in parts of n values, mean m, centred squares q), one
reduction adds

    sum n*m        sum q        sum n*m*m          in float64, so that nothing cancels

and all ranks normalise what they hold, halo included. Backward: S1 = sum dy and S2 = sum dy*xhat run over
all held pixels, since each rank's dy is partial; one reduction; the correction goes to owned pixels only.
Where the norm rectifies, dy passes only where its result is larger than zero: compiled passes compute that
anew, torch's operators look at the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.program import Normalise
from shardwise.program.replica_sum import REPLICA_SUM
from shardwise.runtime.columns import affine, combine, moments, one_pass, products, spread, wide_enough
from shardwise.runtime.regrid import Exchange
from shardwise.runtime.replica_sum import ReplicaSum
from shardwise.runtime.shared_group_norm import SharedGroupNorm, accumulate
from shardwise.runtime.wire import Pending, Wire, Wires


def bind_norm(
    op: Normalise, rank: int, wires: Wires, tensors: Mapping[str, Tensor], room: Exchange | None = None
) -> SharedBatchNorm | SharedGroupNorm | ReplicaSum:
    """Return one rank's part of a normalisation whose statistics several ranks share.

    One that lands makes its result in the `room` of the exchange that reads it.
    """
    if op.layer.op == REPLICA_SUM:
        return ReplicaSum(op, wires.replicas)
    if op.layer.op == "batch_norm":
        wire = wires.group_and_replicas if op.over == "group" else wires.replicas
        return SharedBatchNorm(op, rank, wire, tensors, room)
    return SharedGroupNorm(op, rank, wires, tensors)


@dataclass
class Saved:
    """What the backward pass needs again."""

    x: Tensor
    mean: Tensor
    rstd: Tensor
    scale: Tensor
    shift: Tensor
    rectified: Tensor | None


@dataclass
class UnderWay:
    """A backward pass whose sums travel."""

    saved: Saved
    dy: Tensor
    sums: Tensor
    pending: Pending
    own: bool
    gate: tuple[Tensor, Tensor] | None


class SharedBatchNorm:
    """One rank's part of a synchronised batch norm."""

    def __init__(
        self,
        op: Normalise,
        rank: int,
        wire: Wire,
        tensors: Mapping[str, Tensor],
        room: Exchange | None = None,
    ) -> None:
        layer = op.layer
        held, want = op.reads[0].layout.box(rank), op.wants[0].box(rank)
        self.crop = None if want == held else want.slices(held)
        self.wire, self.layer, self.what = wire, layer, f"sums of {layer.name} (backward)"
        self.eps, self.momentum = layer.attributes["eps"], layer.attributes["momentum"]
        self.rectifies, self.room = op.rectifies, room
        owned = op.owned.box(rank).intersect(want)
        self.owned = None if owned == want else owned.slices(want)
        self.count = op.samples * math.prod(layer.shape[2:])
        roles = {o.role: o.source for o in layer.operands}
        self.weight, self.bias, self.running_mean, self.running_var, self.counter = (
            tensors.get(roles.get(role, ""))
            for role in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        )

    def forward(self, tensor: Tensor) -> tuple[Tensor, Saved]:
        """Normalise what this rank holds with the statistics of all."""
        x = tensor if self.crop is None else tensor[self.crop]
        mean, var = self._statistics(x if self.owned is None else x[self.owned])
        self._track(mean, var)
        rstd = (var + self.eps).rsqrt()
        scale = rstd if self.weight is None else rstd * self.weight.detach()
        shift = mean * -scale if self.bias is None else self.bias.detach() - mean * scale
        place = None if self.room is None else self.room.reserve()
        y = affine(x, scale, shift, self.rectifies, place)
        looked_at = self.rectifies and not (self.owned is None and one_pass(x))
        return y, Saved(x, mean, rstd, scale, shift, y if looked_at else None)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sums = moments(x)
        self.wire.all_reduce(sums)
        count = max(1, self.count)
        mean = sums[0] / count
        return mean, ((sums[1] + (sums[2] - mean * sums[0])) / count).clamp_(min=0.0)

    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Update the running statistics as one device would."""
        if self.running_mean is None or self.running_var is None or not self.count:
            return
        factor = self.momentum
        if self.counter is not None:
            self.counter.add_(1)
            if factor is None:
                factor = 1.0 / float(self.counter)
        if self.layer.attributes.get("unbiased", True):
            var = var * (self.count / max(1, self.count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(var.to(self.running_var.dtype), factor)

    def begin(self, saved: Saved, dy: Tensor, own: bool = True) -> UnderWay:
        """Add this rank's share to the gradients of weight and bias; start to sum the shares of all.

        A gradient that is our `own` is overwritten.
        """
        gate = (saved.scale, saved.shift) if self.rectifies else None
        if saved.rectified is not None:
            dy, gate, own = torch.ops.aten.threshold_backward(dy, saved.rectified, 0), None, True
        sums = products(dy, saved.x, saved.mean.to(wide_enough(saved.x.dtype)), gate)
        sums[1] *= saved.rstd
        if self.weight is not None and self.weight.requires_grad:
            accumulate(self.weight, sums[1].to(self.weight.dtype))
        if self.bias is not None and self.bias.requires_grad:
            accumulate(self.bias, sums[0].to(self.bias.dtype))
        pending = self.wire.start_all_reduce(sums, self.what, in_turn=True)
        return UnderWay(saved, dy, sums, pending, own, gate)

    def end(self, under_way: UnderWay) -> Tensor:
        """Return the gradient of the input, if possible in the memory of the gradient that was given."""
        under_way.pending.wait()
        dy, saved = under_way.dy, under_way.saved
        sums = under_way.sums / max(1, self.count)
        slope = saved.scale * saved.rstd * sums[1]
        offset = saved.scale * sums[0] - slope * saved.mean
        if self.owned is None:
            return combine(dy, saved.x, saved.scale, slope, offset, under_way.own, under_way.gate)
        scale, slope, offset = (spread(t.to(dy.dtype), dy) for t in (saved.scale, slope, offset))
        dx = dy.mul_(scale) if under_way.own else dy * scale
        dx[self.owned].addcmul_(saved.x[self.owned], slope, value=-1.0).sub_(offset)
        return dx

    def backward(self, saved: Saved, dy: Tensor) -> Tensor:
        """Do both halves at once."""
        return self.end(self.begin(saved, dy))
