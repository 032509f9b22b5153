"""Values are made inside the tensors that regrids widen them to, where all their readers allow it."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from rules_harness import differences, run_split, run_whole, subject
from torch import Tensor, nn

from shardwise.program import Regrid, StageProgram
from shardwise.runtime.overlap import Overlap
from shardwise.runtime.regrid import Exchange


class Residual(nn.Module):
    """A value with a halo that is added to later, and a concatenation with a halo."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(8, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.norm(self.first(x)))
        b = torch.relu(a + self.second(a))
        return self.last(torch.cat([b, 2 * b], 1))


class Elsewhere(nn.Module):
    """A value with a halo that a pooling reads too, and one that leaves with the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.first(x))
        return self.second(a)[:, :, ::2, ::2] + nn.functional.max_pool2d(a, 2)


def landing(program: StageProgram) -> list[str]:
    """Return the operators whose results are made inside wider tensors."""
    makers = {op.makes.slot: op.layer.op for op in program.ops if not isinstance(op, Regrid)}
    return [makers[op.source.slot] for op in program.ops if isinstance(op, Regrid) and op.lands(0)]


LINES = ["spatial=2x1", "spatial=2x2", "spatial=1x3", "spatial=2x1 halo=fused", "filter=2", "spatial=9x1"]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("norm", [False, True])
def test_what_is_made_in_place_is_exact(line: str, norm: bool) -> None:
    model = Residual(norm=norm)
    it = subject(model, (2, 3, 14, 13))
    program = it.lower(line)
    assert landing(program)
    owner = copy.deepcopy(model)
    assert differences(run_split(it, program), run_whole(it, owner, owner)) == []


def test_a_part_that_is_frozen_is_exact() -> None:
    model = Residual(norm=True)
    model.first.requires_grad_(False)
    it = subject(model, (2, 3, 14, 13))
    owner = copy.deepcopy(model)
    assert differences(run_split(it, it.lower("spatial=2x1")), run_whole(it, owner, owner)) == []


def test_nothing_of_a_tile_is_copied() -> None:
    it = subject(Residual(), (2, 3, 14, 13))
    program = it.lower("spatial=2x1")
    assert landing(program) == ["relu", "cat"]
    kept: list[bool] = []
    keep = Exchange._keep

    def copying(self: Exchange) -> Tensor:
        kept.append(True)
        return keep(self)

    with mock.patch.object(Exchange, "_keep", copying):
        run_split(it, program)
        assert not kept
        # Convolutions of interiors read the tile itself: it is made on its own then.
        run_split(it, program, overlap=Overlap(forward=True, backward=True))
        assert kept


def test_readers_that_would_copy_a_tile_with_gaps_get_their_own() -> None:
    program = subject(Elsewhere(), (2, 3, 12, 12)).lower("spatial=2x1")
    assert any(isinstance(op, Regrid) for op in program.ops)
    assert landing(program) == []
