"""Batch norm whose statistics several ranks share, exactly.

Forward: every rank sums over the pixels it owns (n values, mean m, centred squares q), one reduction adds

    sum n*m        sum q        sum n*m*m          in float64, so that nothing cancels

and all ranks normalise what they hold, halo included. Backward: S1 = sum dy and S2 = sum dy*xhat run over
all held pixels, since each rank's dy is partial; one reduction; the correction goes to owned pixels only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.program import Normalise
from shardwise.program.replica_sum import REPLICA_SUM
from shardwise.runtime.replica_sum import ReplicaSum
from shardwise.runtime.shared_group_norm import SharedGroupNorm, accumulate, wide_enough
from shardwise.runtime.wire import Pending, Wire, Wires


def bind_norm(
    op: Normalise, rank: int, wires: Wires, tensors: Mapping[str, Tensor]
) -> SharedBatchNorm | SharedGroupNorm | ReplicaSum:
    """Return one rank's part of a normalisation whose statistics several ranks share."""
    if op.layer.op == REPLICA_SUM:
        return ReplicaSum(op, wires.replicas)
    if op.layer.op == "batch_norm":
        wire = wires.group_and_replicas if op.over == "group" else wires.replicas
        return SharedBatchNorm(op, rank, wire, tensors)
    return SharedGroupNorm(op, rank, wires, tensors)


@dataclass
class Saved:
    """What the backward pass needs again."""

    x: Tensor
    mean: Tensor
    var: Tensor


@dataclass
class UnderWay:
    """A backward pass whose sums travel."""

    saved: Saved
    dy: Tensor
    sums: Tensor
    pending: Pending
    own: bool


class SharedBatchNorm:
    """One rank's part of a synchronised batch norm."""

    def __init__(self, op: Normalise, rank: int, wire: Wire, tensors: Mapping[str, Tensor]) -> None:
        layer = op.layer
        held, want = op.reads[0].layout.box(rank), op.wants[0].box(rank)
        self.crop = None if want == held else want.slices(held)
        self.wire, self.layer, self.what = wire, layer, f"sums of {layer.name} (backward)"
        self.eps, self.momentum = layer.attributes["eps"], layer.attributes["momentum"]
        owned = op.owned.box(rank).intersect(want)
        self.owned = None if owned == want else owned.slices(want)
        self.channels = owned.shape[1]
        self.local_count = owned.size // max(1, self.channels)
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
        local_mean, local_var = mean.to(x.dtype), var.to(x.dtype)
        y = torch.nn.functional.batch_norm(
            x, local_mean, local_var, self.weight, self.bias, False, 0.0, self.eps
        )
        return y, Saved(x, local_mean, local_var)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.zeros((3, self.channels), dtype=torch.float64, device=x.device)
        if self.local_count:
            dims = (0, *range(2, x.ndim))
            mean = x.mean(dims, dtype=wide_enough(x.dtype))
            centred = x - mean.view(1, -1, *(1,) * (x.ndim - 2))
            wide = mean.double()
            sums[0] = wide * self.local_count
            sums[1] = centred.square_().sum(dims)
            sums[2] = wide * wide * self.local_count
        self.wire.all_reduce(sums)
        count = max(1, self.count)
        mean = sums[0] / count
        return mean, (sums[1] + (sums[2] - mean * sums[0])) / count

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
        x, mean, var = saved.x, saved.mean, saved.var
        if x.numel():
            _, s2, s1 = torch.ops.aten.native_batch_norm_backward(
                dy, x, self.weight, mean, var, None, None, False, self.eps, [False, True, True]
            )
        else:
            # torch divides by the number of samples here, and a share may have none.
            s2, s1 = torch.zeros_like(mean), torch.zeros_like(mean)
        if self.weight is not None and self.weight.requires_grad:
            accumulate(self.weight, s2)
        if self.bias is not None and self.bias.requires_grad:
            accumulate(self.bias, s1)
        sums = torch.stack((s1, s2)).double()
        pending = self.wire.start_all_reduce(sums, self.what, in_turn=True)
        return UnderWay(saved, dy, sums, pending, own)

    def end(self, under_way: UnderWay) -> Tensor:
        """Return the gradient of the input, if possible in the memory of the gradient that was given."""
        under_way.pending.wait()
        dy, sums, x = under_way.dy, under_way.sums, under_way.saved.x
        rstd = (under_way.saved.var.double() + self.eps).rsqrt()
        scale = rstd if self.weight is None else rstd * self.weight.detach().double()
        slope = scale * rstd * sums[1] / max(1, self.count)
        offset = scale * sums[0] / max(1, self.count) - slope * under_way.saved.mean.double()
        shape = (1, -1, *(1,) * (x.ndim - 2))
        scale, slope, offset = (t.to(x.dtype).view(shape) for t in (scale, slope, offset))
        dx = dy.mul_(scale) if under_way.own else dy * scale
        inner_x, inner_dx = (x, dx) if self.owned is None else (x[self.owned], dx[self.owned])
        inner_dx.addcmul_(inner_x, slope, value=-1.0).sub_(offset)
        return dx

    def backward(self, saved: Saved, dy: Tensor) -> Tensor:
        """Do both halves at once."""
        return self.end(self.begin(saved, dy))
