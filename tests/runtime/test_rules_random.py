"""Dropout draws one mask whatever the plan; layers of which nothing is known run whole, with one mask too."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from rules_harness import Subject, check, compare, run_split, run_whole, subject
from torch import Tensor, nn

from shardwise.geometry import Box
from shardwise.runtime.rules import Surroundings
from shardwise.runtime.rules.dropout import keep_mask, key_of, positions

SHAPE = (4, 4, 13, 9)
PLANS = ("spatial=3x1", "spatial=2x2", "spatial=2 halo=fused", "filter=2", "channel=2", "batch=3")


def network(dropout: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), dropout, nn.Conv2d(4, 4, 3, padding=1))


def whole(it: Subject, surroundings: Surroundings) -> dict[str, Tensor]:
    return run_split(it, it.lower("data=1"), surroundings)


@pytest.mark.parametrize("dropout", [nn.Dropout(0.3), nn.Dropout2d(0.5), nn.Dropout(1.0)], ids=repr)
def test_dropout_is_the_same_under_every_plan(dropout: nn.Module) -> None:
    it = subject(network(dropout), SHAPE)
    expected = whole(it, Surroundings())
    assert torch.isfinite(expected["output"]).all()
    check(it, expected, PLANS)


def test_dropout_changes_with_step_layer_seed_and_sample() -> None:
    it = subject(network(nn.Dropout(0.5)), SHAPE)
    masks = [
        whole(it, Surroundings(seed=seed, step=step, first_sample=first))["output"]
        for seed, step, first in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 4))
    ]
    same = [(i, j) for i in range(4) for j in range(i) if torch.equal(masks[i], masks[j])]
    assert not same
    assert key_of(Surroundings(), "a") != key_of(Surroundings(), "b")


def test_samples_keep_their_masks_when_a_micro_batch_begins_later() -> None:
    box = Box.whole((6, 3, 5))
    places = positions((6, 3, 5), box, torch.device("cpu"))
    mask = keep_mask(key_of(Surroundings(seed=7), "drop"), 0, box, places, 0.5)
    later = keep_mask(key_of(Surroundings(seed=7), "drop"), 4, Box.whole((2, 3, 5)), places, 0.5)
    assert torch.equal(mask[4:], later)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_keep_the_right_share_without_visible_patterns(p: float) -> None:
    box = Box.whole((16, 8, 32, 32))
    places = positions(box.shape, box, torch.device("cpu"))
    keep = keep_mask(key_of(Surroundings(), "drop"), 0, box, places, p).double()
    count = keep.numel()
    assert abs(float(keep.mean()) - (1 - p)) < 5 * (p * (1 - p) / count) ** 0.5
    centred = keep - keep.mean()
    for dim in range(4):
        neighbours = (centred * centred.roll(1, dim)).mean() / centred.square().mean()
        assert abs(float(neighbours)) < 5 / count**0.5


class Sorted(nn.Module):
    """Something no rule knows, with a parameter, a buffer that it updates, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        if not isinstance(x, Tensor):
            raise TypeError("tracing with stand-ins for tensors ends here")
        return torch.sort(x * self.scale, -1)[0], x.cumsum(1).mean(1, keepdim=True)


class AroundOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.opaque = nn.Conv2d(4, 4, 3, padding=1), Sorted()
        self.after = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        ordered, mean = self.opaque(self.before(x))
        return self.after(ordered) * mean


def test_opaque_module_between_tiled_layers_runs_whole() -> None:
    compare(AroundOpaque(), SHAPE, PLANS)


def test_layers_behind_an_opaque_module_are_tiled_again() -> None:
    it = subject(AroundOpaque(), SHAPE)
    program = it.lower("spatial=2")
    made = {op.layer.name: op.makes.layout for op in program.ops if hasattr(op, "layer")}
    assert made["before"].boxes[0].shape[2] == 7
    assert made["after"].boxes[0].shape[2] == 7


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.rrelu(self.conv(x), training=True))


def test_opaque_layers_draw_the_same_numbers_on_all_ranks_and_leave_the_generator_alone() -> None:
    it = subject(Random(), SHAPE)
    expected = whole(it, Surroundings())
    before = torch.random.get_rng_state()
    check(it, expected, ("spatial=2x2", "filter=2"))
    assert torch.equal(before, torch.random.get_rng_state())


def test_dropout_in_evaluation_does_nothing() -> None:
    model = network(nn.Dropout(0.5)).eval()
    it = subject(model, SHAPE)
    owner = copy.deepcopy(model)
    check(it, run_whole(it, owner, owner), PLANS)
