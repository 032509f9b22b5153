"""A sum hands the very same gradient to all of its operands; who changes one must not change the others."""

from __future__ import annotations

import copy

import pytest
import torch
from rules_harness import differences, run_split, run_whole, subject
from torch import Tensor, nn

from shardwise.runtime.overlap import NOTHING, Overlap

BOTH = Overlap(forward=True, backward=True)


def pointwise() -> nn.Module:
    return nn.Conv2d(3, 3, 1)


def wide() -> nn.Module:
    return nn.Conv2d(3, 3, 3, padding=1)


class _Parts(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


class ThreeInARow(_Parts):
    """Each of the first two is read by the next one and by the sum."""

    def __init__(self) -> None:
        super().__init__(pointwise(), pointwise(), pointwise(), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        a = self.parts[0](x)
        b = self.parts[1](a)
        return self.parts[3](self.parts[2](b)) + a + b


class TwoBeside(_Parts):
    """One output of a segment is read inside, another one is not, and both get the gradient of a sum."""

    def __init__(self) -> None:
        super().__init__(pointwise(), pointwise(), pointwise(), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        c, a = self.parts[0](x), self.parts[1](x)
        return self.parts[3](self.parts[2](a)) + c + a


class SumOfSums(_Parts):
    """What an exchange will add its halo to comes through two sums."""

    def __init__(self) -> None:
        super().__init__(pointwise(), wide(), wide(), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts[0](x).relu()
        z = self.parts[1](y)
        c = y + z
        return self.parts[3](self.parts[2](c)) + c + z


class PutOff(_Parts):
    """The gradient of a convolution whose weights are put off is that of the norm in front of it too."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(3), pointwise(), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts[0](x)
        c = self.parts[1](y)
        return self.parts[2](c) + c + y


class InTheGaps(_Parts):
    """Some tiles of a transposed convolution have nothing but bias, and their input another reader."""

    def __init__(self) -> None:
        super().__init__(pointwise(), nn.ConvTranspose2d(3, 3, 1, 4), pointwise(), nn.BatchNorm2d(3))

    def forward(self, x: Tensor) -> Tensor:
        a = self.parts[0](x)
        return self.parts[3](self.parts[1](a)).mean() + self.parts[2](a)


@pytest.mark.parametrize("overlap", [NOTHING, BOTH])
@pytest.mark.parametrize("line", ["spatial=2x1", "spatial=2x2 halo=fused", "spatial=1x3"])
@pytest.mark.parametrize("make", [ThreeInARow, TwoBeside, SumOfSums, PutOff, InTheGaps])
def test_shared_gradients_are_exact(make: type[nn.Module], line: str, overlap: Overlap) -> None:
    torch.manual_seed(0)
    model = make()
    it = subject(model, (2, 3, 9, 8))
    owner = copy.deepcopy(model)
    assert not differences(run_split(it, it.lower(line), overlap=overlap), run_whole(it, owner, owner))
