"""Losses that broadcast: their samples must stay side by side, or shares of the mini-batch are refused."""

from __future__ import annotations

import exact_workers as workers
import pytest
import torch
import torch.nn.functional as F

from ranks import run_ranks
from shardwise.graph import capture_loss
from shardwise.training.loss_kind import loss_kind
from shardwise.training.replica_sums import with_replica_sums

BOUND = 1e-10
pytestmark = pytest.mark.filterwarnings("ignore:Using a target size")


def squares(output, target):
    return ((output - target) ** 2).mean()


def squares_reversed(output, target):
    return ((target - output) ** 2).mean()


def element_by_element(output, target):
    return F.l1_loss(output, target, reduction="none").mean()


def ratio_of_sums(output, target):
    return (output * target).sum() / output.sum()


@pytest.mark.parametrize(
    "loss", [F.mse_loss, squares, squares_reversed, element_by_element, ratio_of_sums, F.huber_loss]
)
def test_targets_that_are_broadcast_over_the_samples_make_no_mean(loss):
    output, target = torch.rand(6, 1, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    ending = capture_loss(loss, output, target)
    assert loss_kind(ending).kind == "other"
    assert with_replica_sums(ending) is None


@pytest.mark.parametrize("name", ["l1 sum", "l1", "squares", "kl"])
@pytest.mark.parametrize("plan", ["data=2", "stages=2 micro_batches=2", "data=2 spatial=2x1"])
def test_targets_that_are_broadcast_over_pixels_equal_one_device(name, plan):
    ranks = 4 if plan.startswith("data=2 ") else 2
    for error in run_ranks(workers.broadcast_over_pixels, ranks, args=(plan, name)):
        assert error < BOUND


def test_a_loss_that_compares_all_samples_with_all_is_refused_shares():
    for plan in ("data=2", "stages=2 micro_batches=2"):
        for said in run_ranks(workers.broadcast_over_samples, 2, args=(plan,)):
            assert "'mse_loss' computes is no mean over samples" in said
    assert max(run_ranks(workers.broadcast_over_samples, 2, args=("stages=2",))) < BOUND
