"""A batch norm and the rectification behind it are one operation where nobody can tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.graph import capture
from shardwise.plan import Plan
from shardwise.program import Compute, Normalise, StageProgram
from shardwise.program.lowered import lower


class Network(nn.Module):
    """A norm and what reads it, as `reads` says."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.first, self.norm, self.last = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 2, 3),
        )

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.norm(self.first(x))
        if self.reads == "relu":
            return self.last(torch.relu(y))
        if self.reads == "another":
            return self.last(torch.sigmoid(y))
        if self.reads == "twice":
            return self.last(torch.relu(y) + y)
        if self.reads == "leaves":
            return self.last(torch.relu(y)), y
        return self.last(torch.relu(y)) + self.last(torch.relu(y))


def lowered(reads: str, line: str, training: bool = True) -> StageProgram:
    graph = capture(Network(reads), torch.zeros(2, 3, 16, 16), training=training, check=False)
    return lower(graph, Plan.parse(line)).stage(0, 0, 0)


def counts(program: StageProgram) -> tuple[int, int]:
    """Return how many norms rectify, and how many rectifications are left."""
    norms = [op for op in program.ops if isinstance(op, Normalise) and op.rectifies]
    return len(norms), sum(isinstance(op, Compute) and op.layer.op == "relu" for op in program.ops)


@pytest.mark.parametrize("line", ["spatial=2x1", "spatial=2x2 halo=fused", "data=2"])
def test_a_norm_rectifies_what_only_a_rectification_reads(line: str) -> None:
    program = lowered("relu", line)
    assert counts(program) == (1, 0)
    (norm,) = [op for op in program.ops if isinstance(op, Normalise)]
    # Its readers find the value of the rectification.
    assert norm.makes.value != norm.layer.name
    assert norm.landing == (line == "spatial=2x1" or "fused" in line)


@pytest.mark.parametrize(
    ("reads", "expected"), [("another", (0, 0)), ("twice", (0, 1)), ("leaves", (0, 1)), ("both", (0, 2))]
)
def test_a_norm_that_others_read_does_not(reads: str, expected: tuple[int, int]) -> None:
    assert counts(lowered(reads, "spatial=2x1")) == expected


@pytest.mark.parametrize(("line", "training"), [("spatial=2x1", False), ("filter=2", True)])
def test_a_norm_that_shares_nothing_does_not(line: str, training: bool) -> None:
    assert counts(lowered("relu", line, training)) == (0, 1)
