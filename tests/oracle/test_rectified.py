"""Rectifications that batch norms do themselves are priced, weighed and scaled as what they are."""

import pytest
import torch
from oracle_cases import Fixed
from torch import nn

from shardwise.graph import capture
from shardwise.oracle.kernels import Direction, Task
from shardwise.oracle.memory import footprint
from shardwise.oracle.profile import Profile, key_of, measured
from shardwise.oracle.search.classes import Sorter
from shardwise.plan import Plan
from shardwise.plan.split import parse_split
from shardwise.program import Normalise
from shardwise.program.lowered import lower


class Cells(nn.Module):
    """Rectified values that nothing but a sum reads, and norms that are not rectified."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        return self.first(x) + self.second(x) + self.third(x)


@pytest.fixture(scope="module")
def graph():
    return capture(Cells(), torch.zeros(4, 3, 16, 16), training=True, check=False)


def program(graph, line):
    return lower(graph, Plan.parse(line)).stage(0, 0, 0)


def test_what_nobody_reads_again_is_not_kept(graph):
    here = program(graph, "spatial=2x1")
    # The image is not weighed; three convolutions are kept for three norms, and nothing behind them.
    image, made = 2 * 4 * 3 * 9 * 16, 3 * 4 * 4 * 4 * 8 * 16
    kept = footprint(here, 0).kept
    assert made <= kept <= made + 4 * image
    # Torch's operators look at what was rectified once more.
    assert footprint(here, 0, host=False).kept == kept + 2 * made // 3


def test_the_search_counts_no_more_than_the_program_keeps(graph):
    sorted_ = Sorter(graph).sort(parse_split("2x1", "split"), "layer")
    saved = sum(sorted_.classes[i].saved for i in sorted_.of)
    # Means and variances of the norms are a few bytes.
    assert saved <= 1.01 * footprint(program(graph, "spatial=2x1"), 0).kept


def test_norms_that_rectify_are_scaled_from_their_like(graph):
    norms = [op for op in program(graph, "spatial=2x1").ops if isinstance(op, Normalise)]
    few = [op for op in program(graph.with_batch(2), "spatial=2x1").ops if isinstance(op, Normalise)]
    profile = Profile("here", 1, Fixed())
    for op, seconds in zip(norms, (2.0, 2.0, 1.0), strict=True):
        times = {d.value: seconds for d in Direction}
        profile.add(key_of(Task.of(op, 0)), measured(Task.of(op, 0), times, dict.fromkeys(times, 0.0)))
    first, _, third = (profile.seconds(Task.of(op, 0), Direction.FORWARD).seconds for op in few)
    assert first == pytest.approx(1.0, rel=0.05)
    assert third == pytest.approx(0.5, rel=0.05)
