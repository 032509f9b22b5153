"""Networks that mix the samples of a mini-batch are refused shares of it; all others are not."""

from __future__ import annotations

import exact_workers as workers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from ranks import run_ranks
from shardwise.plan import Plan
from shardwise.training.auto import changes_numbers
from shardwise.training.mixing import mixing_layer

BOUND = 1e-10


class Through(nn.Module):
    """A convolution and a function behind it."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


def spread_of_groups(x):
    """Minibatch standard deviation, of groups of four."""
    y = x.view(4, -1, *x.shape[1:])
    y = (y - y.mean(0, keepdim=True)).square().mean(0).sqrt().mean((1, 2, 3), keepdim=True)
    return torch.cat([x, y.repeat(4, 1, *x.shape[2:])], 1)


def own_weights(x):
    """A convolution with weights of each sample's own: the samples pose as groups."""
    n, c = x.shape[:2]
    weight = x.mean((2, 3)).reshape(n, 1, c, 1, 1).expand(n, 5, c, 1, 1).reshape(n * 5, c, 1, 1)
    return F.conv2d(x.reshape(1, n * c, *x.shape[2:]), weight, groups=n).view(n, 5, *x.shape[2:])


MIXED = {
    "a mean over samples": lambda x: x - x.mean((0, 2, 3), keepdim=True),
    "minibatch standard deviation": spread_of_groups,
    "softmax over samples": lambda x: x.softmax(0),
    "samples as positions": lambda x: F.scaled_dot_product_attention(*[x.flatten(2).permute(2, 0, 1)] * 3),
    "the largest of all": lambda x: x / x.max(),
    "products of samples": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "samples against each other": lambda x: x.mean((1, 2, 3))[:, None] - x.mean((1, 2, 3)),
    "the next sample": lambda x: x + x.roll(1, 0),
    "the first sample": lambda x: x - x[:1],
    "every other sample": lambda x: x[::2] + x[1::2],
    "samples that pose as channels": lambda x: F.batch_norm(x.flatten(0, 1)[None], None, None, training=True),
    "an undescribed reduction": lambda x: x / x.std(0, keepdim=True),
    "an undescribed normalisation": lambda x: F.normalize(x, dim=0),
    "an undescribed running sum": lambda x: x.cumsum(0),
    "an undescribed order": lambda x: x.sort(0)[0],
}
ALONE = {
    "frames in turn": lambda x: x.flatten(0, 1)[:, None].relu().view(x.shape).mean(1),
    "one frame of each": lambda x: x.flatten(0, 1)[::4].relu() + x[:, 1],
    "copies in turn": lambda x: torch.cat([x, x.flip(3)], 0).relu().chunk(2, 0)[1] * x,
    "a sum over copies": lambda x: torch.stack([x, 2 * x], 0).mean(0),
    "samples along two dimensions": lambda x: (2 * x.view(2, -1, *x.shape[1:])).view(x.shape) + x,
    "samples last": lambda x: x.permute(1, 0, 2, 3).softmax(0).permute(1, 2, 3, 0),
    "weights of each sample": own_weights,
    "products within samples": lambda x: torch.einsum("nchw,nkhw->nck", x, x),
    "an undescribed normalisation": lambda x: F.normalize(x, dim=1),
    "an undescribed order": lambda x: x.sort(1)[0],
    "something new": lambda x: x + x.new_zeros(4, 1, 1),
}


def captured(function, batch: int = 8):
    return sw.capture(Through(function), torch.randn(batch, 3, 6, 6), training=True)


@pytest.mark.parametrize("name", MIXED)
def test_a_layer_that_mixes_samples_is_found(name):
    assert mixing_layer(captured(MIXED[name])) is not None


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("batch", [2, 8])
def test_a_network_that_treats_samples_alone_is_not_refused(name, batch):
    assert mixing_layer(captured(ALONE[name], batch)) is None


def test_auto_does_not_share_out_a_network_that_mixes_samples():
    graph = captured(MIXED["softmax over samples"])
    for plan in ("data=2", "stages=2 micro_batches=2"):
        assert "'softmax'" in changes_numbers(graph, Plan.parse(plan))
    assert changes_numbers(graph, Plan.parse("spatial=2x1")) == ""


@pytest.mark.parametrize(
    ("plan", "nearest"),
    [
        ("data=2", "batch=2"),
        ("stages=2 micro_batches=2", "stages=2"),
        ("stages=2 schedule=gems-mast", "stages=2"),
    ],
)
def test_a_network_that_mixes_samples_is_refused_with_a_plan_that_equals_one_device(plan, nearest):
    for said in run_ranks(workers.mixed, 2, args=(plan,)):
        assert "the layer 'mean' (mean" in said
        assert said.endswith(f"nearest plan that works: {nearest}")
    for error in run_ranks(workers.mixed, 2, args=(nearest,)):
        assert error < BOUND
