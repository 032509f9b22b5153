"""Group and instance norm whose statistics several ranks share, exactly.

Every sample has G groups of channels (instance norm: as many as channels), so the statistics are tables of
samples x groups. Forward: a rank adds up, per sample and channel, what it owns (n pixels, mean m, centred
squares q); folded to groups, one reduction over the ranks of the group gives

    mean = sum n*m / N        variance = (sum q + sum n*m*m - mean * sum n*m) / N

in float64. Backward, with w the weight and xhat the normalised input, D1 = sum w*dy and D2 = sum w*dy*xhat
per sample and group run over all held pixels, since each rank's dy is partial; one reduction; then

    dx = rstd * (w*dy - (D1 + xhat*D2) / N)        the second term on owned pixels only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.program import Normalise
from shardwise.runtime.columns import wide_enough
from shardwise.runtime.wire import Pending, Wires


@dataclass
class Saved:
    """What the backward pass needs again; `mean` and `rstd` are samples x channels of this rank."""

    x: Tensor
    mean: Tensor
    rstd: Tensor


@dataclass
class UnderWay:
    """A backward pass whose sums travel."""

    saved: Saved
    dy: Tensor
    xhat: Tensor
    sums: Tensor
    pending: Pending


class SharedGroupNorm:
    """One rank's part of a group or instance norm over tiles or channel shards."""

    def __init__(self, op: Normalise, rank: int, wires: Wires, tensors: Mapping[str, Tensor]) -> None:
        layer = op.layer
        held, want = op.reads[0].layout.box(rank), op.wants[0].box(rank)
        self.crop = None if want == held else want.slices(held)
        self.wires, self.first, self.what = wires, rank == 0, f"sums of {layer.name} (backward)"
        self.eps, self.samples = layer.attributes["eps"], op.samples
        owned = op.owned.box(rank).intersect(want)
        self.owned = None if owned == want else owned.slices(want)
        self.owned_rows = slice(owned.lo[0] - want.lo[0], owned.hi[0] - want.lo[0])
        self.pixels = math.prod(owned.shape[2:])
        channels = layer.shape[1]
        groups = layer.attributes.get("num_groups", channels)
        self.table = (layer.shape[0], groups)
        self.rows = slice(want.lo[0], want.hi[0])
        self.group_of = torch.tensor([c * groups // channels for c in range(want.lo[1], want.hi[1])])
        self.count = channels // groups * math.prod(layer.shape[2:])
        self.momentum = layer.attributes.get("momentum")
        roles = {o.role: o.source for o in layer.operands}
        self.weight, self.bias, self.running_mean, self.running_var = (
            tensors.get(roles.get(role, "")) for role in ("weight", "bias", "running_mean", "running_var")
        )

    def forward(self, tensor: Tensor) -> tuple[Tensor, Saved]:
        """Normalise what this rank holds with the statistics of all."""
        x = tensor if self.crop is None else tensor[self.crop]
        mean, var = self._statistics(x)
        self._track(mean, var)
        columns = self.group_of.to(x.device)
        local_mean = mean[self.rows][:, columns].to(x.dtype)
        rstd = (var + self.eps).rsqrt()[self.rows][:, columns].to(x.dtype)
        y = (x - _spread(local_mean, x)) * _spread(self._scaled(rstd), x)
        if self.bias is not None:
            y += _spread(self.bias[None].to(x.dtype), x)
        return y, Saved(x, local_mean, rstd)

    def _scaled(self, values: Tensor) -> Tensor:
        return values if self.weight is None else values * self.weight.detach()

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.zeros((3, *self.table), dtype=torch.float64, device=x.device)
        inner = x if self.owned is None else x[self.owned]
        if inner.numel():
            dims = tuple(range(2, inner.ndim))
            mean = inner.mean(dims, dtype=wide_enough(inner.dtype)) if dims else inner
            squares = (inner - _spread(mean, inner)).square_()
            wide = mean.double()
            terms = (wide * self.pixels, squares.sum(dims) if dims else squares, wide * wide * self.pixels)
            rows = slice(self.rows.start + self.owned_rows.start, self.rows.start + self.owned_rows.stop)
            columns = self.group_of[self._owned_channels()].to(x.device)
            for table, term in zip(sums, terms, strict=True):
                table[rows] = table[rows].index_add(1, columns, term.double())
        self.wires.group.all_reduce(sums)
        mean = sums[0] / self.count
        return mean, (sums[1] + (sums[2] - mean * sums[0])) / self.count

    def _owned_channels(self) -> slice:
        return slice(None) if self.owned is None else self.owned[1]

    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Update running statistics, the mean over all samples of all replicas, as one device would."""
        if self.running_mean is None or self.running_var is None:
            return
        unbiased = var * (self.count / max(1, self.count - 1))
        sums = torch.stack((mean.sum(0), unbiased.sum(0)))
        if not self.first:
            sums.zero_()
        self.wires.group_and_replicas.all_reduce(sums)
        sums = sums[:, self.group_of.to(sums.device)] / self.samples
        self.running_mean.lerp_(sums[0].to(self.running_mean.dtype), self.momentum or 0.0)
        self.running_var.lerp_(sums[1].to(self.running_var.dtype), self.momentum or 0.0)

    def begin(self, saved: Saved, dy: Tensor, own: bool = True) -> UnderWay:
        """Add this rank's share to the gradients of weight and bias; start to sum the shares of all."""
        x, rstd = saved.x, saved.rstd
        xhat = (x - _spread(saved.mean, x)) * _spread(rstd, x)
        dims = tuple(range(2, x.ndim))
        s1 = dy.sum(dims) if dims else dy
        s2 = (dy * xhat).sum(dims) if dims else dy * xhat
        if self.weight is not None and self.weight.requires_grad:
            accumulate(self.weight, s2.sum(0))
        if self.bias is not None and self.bias.requires_grad:
            accumulate(self.bias, s1.sum(0))
        columns = self.group_of.to(x.device)
        sums = torch.zeros((2, *self.table), dtype=torch.float64, device=x.device)
        for table, term in zip(sums, (s1, s2), strict=True):
            table[self.rows] = table[self.rows].index_add(1, columns, self._scaled(term).double())
        pending = self.wires.group.start_all_reduce(sums, self.what, in_turn=True)
        return UnderWay(saved, dy, xhat, sums, pending)

    def end(self, under_way: UnderWay) -> Tensor:
        """Return the gradient of the input."""
        under_way.pending.wait()
        rstd, xhat, x = under_way.saved.rstd, under_way.xhat, under_way.saved.x
        columns = self.group_of.to(x.device)
        sums = under_way.sums[:, self.rows][:, :, columns].to(x.dtype) / self.count
        dx = under_way.dy * _spread(self._scaled(rstd), x)
        inner = slice(None) if self.owned is None else self.owned
        correction = (_spread(sums[0], x) + xhat * _spread(sums[1], x)) * _spread(rstd, x)
        dx[inner] -= correction[inner]
        return dx

    def backward(self, saved: Saved, dy: Tensor) -> Tensor:
        """Do both halves at once."""
        return self.end(self.begin(saved, dy))


def _spread(table: Tensor, x: Tensor) -> Tensor:
    """Give a table of samples x channels the dimensions of `x`."""
    return table.view(*table.shape, *(1,) * (x.ndim - 2))


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to the gradient of a parameter."""
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    else:
        parameter.grad.add_(gradient)
