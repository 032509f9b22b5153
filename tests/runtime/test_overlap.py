"""Backward starts messages before the weight gradients that hide them, and nothing else changes by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from rules_harness import differences, run_split, run_whole, subject
from torch import Tensor, nn

from shardwise.runtime import weights_later
from shardwise.runtime.grouping import grouped, put_off
from shardwise.runtime.interior import Interior
from shardwise.runtime.overlap import NOTHING, Overlap, overlap_of
from thread_ranks import ThreadWire


class TwoNormsIntoASum(nn.Module):
    """The gradient of the sum is that of the convolution and, the very same tensor, that of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x), self.second(x)
        return self.conv(a) + b


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)
    )


@pytest.mark.parametrize("make", [chain, TwoNormsIntoASum])
def test_overlap_changes_no_bit(make: type[nn.Module]) -> None:
    it = subject(make(), (2, 3, 9, 8))
    program = it.lower("spatial=2x1")
    with_it, without = run_split(it, program), run_split(it, program, overlap=NOTHING)
    assert with_it.keys() == without.keys()
    for name, tensor in without.items():
        assert torch.equal(with_it[name], tensor), name


def test_a_gradient_that_waits_is_not_written_to() -> None:
    model = TwoNormsIntoASum()
    it = subject(model, (2, 3, 9, 8))
    owner = copy.deepcopy(model)
    expected = run_whole(it, owner, owner)
    found = run_split(it, it.lower("spatial=2x1"))
    for name in ("gradient conv.weight", "gradient second.weight", "input x"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)


def test_the_convolution_behind_a_communication_waits() -> None:
    groups = grouped(subject(chain(), (2, 3, 9, 8)).lower("spatial=2x1").ops)
    found = [None if op is None else op.layer.name for op in put_off(groups)]
    behind = [group[0].layer.op for group, name in zip(groups, found, strict=True) if name]
    # The first convolution reads the input, which has its halo when it arrives: nothing to hide there.
    assert len(behind) == 1
    assert found[-1] is not None


def test_weights_that_are_used_twice_do_not_wait() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    groups = grouped(subject(nn.Sequential(conv, nn.ReLU(), conv), (1, 3, 9, 8)).lower("spatial=2x1").ops)
    assert put_off(groups) == [None] * len(groups)


def test_messages_start_before_the_weight_gradient() -> None:
    order: list[str] = []
    sums, weights = ThreadWire.start_all_reduce, weights_later.Note.__call__

    def start(self: ThreadWire, tensor: Tensor, what: str, *, in_turn: bool) -> object:
        if self.rank == 0:
            order.append(f"{what}")
        return sums(self, tensor, what, in_turn=in_turn)

    def work(self: weights_later.Note) -> None:
        order.append("weights")
        weights(self)

    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1))
    it = subject(model, (2, 3, 9, 8))
    with (
        mock.patch.object(ThreadWire, "start_all_reduce", start),
        mock.patch.object(weights_later.Note, "__call__", work),
    ):
        run_split(it, it.lower("spatial=2x1"))
    assert order.count("weights") == 2
    assert "backward" in order[0]


WIDE = Overlap(forward=True, backward=True)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: chain(), "spatial=2x2"),
        (
            lambda: nn.Sequential(chain(), nn.Conv2d(2, 3, 5, 2, 2), nn.ReLU(), nn.Conv2d(3, 3, 3)),
            "spatial=3x1",
        ),
        (lambda: nn.Sequential(chain(), nn.Conv2d(2, 4, 3, 1, 2, dilation=2, groups=2)), "spatial=1x2"),
    ],
)
def test_interiors_computed_ahead_are_exact(make: Callable[[], nn.Module], line: str) -> None:
    model = make()
    it = subject(model, (2, 3, 17, 19))
    owner = copy.deepcopy(model)
    expected = run_whole(it, owner, owner)
    pieces: list[int] = []
    finish = Interior.finish

    def counted(self: Interior, wide: Tensor, made: Tensor) -> Tensor:
        pieces.append(len(self.borders))
        return finish(self, wide, made)

    with mock.patch.object(Interior, "finish", counted):
        found = run_split(it, it.lower(line), overlap=WIDE)
    assert pieces
    assert not differences(found, expected)


def test_the_device_decides_and_other_names_are_refused() -> None:
    assert overlap_of("auto", torch.device("cpu")) == NOTHING
    assert overlap_of("auto", torch.device("cuda")) == WIDE
    with pytest.raises(ValueError, match="expected auto, off, backward, both"):
        overlap_of("always", torch.device("cpu"))
