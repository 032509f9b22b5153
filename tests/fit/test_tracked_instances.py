"""Running statistics of instance norms, however the mini-batch and the images are split."""

from __future__ import annotations

import exact_workers as workers
import pytest
import torch
from torch import nn

import shardwise as sw
from ranks import run_ranks
from shardwise.plan import Plan
from shardwise.training.auto import changes_numbers

PLANS = {
    "stages=2 schedule=gems-mast": 2,
    "stages=2 schedule=bidirectional micro_batches=3": 2,
    "stages=2 micro_batches=2": 2,
    "micro_batches=3 batch_norm=deferred": 1,
    "data=2 stages=2 schedule=gems-mast batch_norm=deferred": 4,
    "data=2": 2,
    "spatial=2x1": 2,
    "batch=2": 2,
    "filter=2": 2,
    "data=2 batch_norm=local": 2,
    "stages=2 spatial=2x1 schedule=gems-mast": 4,
}


@pytest.mark.parametrize("plan", PLANS)
def test_tracked_instance_norms_equal_one_device(plan):
    for error in run_ranks(workers.tracked_instances, PLANS[plan], args=(plan,)):
        assert error < 1e-10


def test_auto_does_not_cut_the_updates_of_tracked_instance_norms():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))
    graph = sw.capture(model, torch.randn(4, 3, 8, 8), training=True)
    assert "instance norm would see 2 micro-batches" in changes_numbers(graph, Plan.parse("micro_batches=2"))
    assert changes_numbers(graph, Plan.parse("data=2")) == ""
