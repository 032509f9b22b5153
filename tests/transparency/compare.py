"""How far two results may be apart.

    error = max|a - b| / max(max|b|, 1e-6 x the model's largest gradient)  <=  1e-10        in float64

Some gradients are zero in exact arithmetic: those of a bias in front of a batch norm, or of a norm in front
of a norm; and so is the mean of a batch norm behind a norm. Both sides hold nothing but rounding then, which
may be 1e-9 of the bound above. So the error of a gradient or a statistic that is smaller than a millionth of
the model's largest gradient is accepted too if it is within ten times the noise floor of that tensor,
measured in the same run: how far one device is from itself when its samples come in another order, when
inputs and first weights differ in their last bit, or when images lie with channels last. Losses, weights and
everything else have the limit alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

LIMIT = 1e-10
FLOOR_FACTOR = 10.0
# What is smaller than this part of the model's largest gradient is zero but for rounding.
ZERO = 1e-6
# Where even one device does not know such a tensor to this accuracy, the case is a bad one and fails.
FLOOR_LIMIT = 1e-8
ZERO_GRADIENT, ZERO_STATISTIC = "zero gradient", "zero statistic"


@dataclass
class Outcome:
    """Everything that a run of some steps leaves behind."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]
    inputs: list[Tensor] = field(default_factory=list)

    def tensors(self) -> dict[str, Tensor]:
        """Name all results."""
        result = {"loss": torch.tensor(self.losses, dtype=torch.float64)}
        result |= {f"gradient of {name}": t for name, t in self.gradients.items()}
        result |= {f"state {name}": t for name, t in self.state.items()}
        return result | {f"gradient of input {i}": t for i, t in enumerate(self.inputs)}


def scale_of(outcome: Outcome) -> float:
    """Return the model's largest gradient."""
    return max((float(g.abs().max()) for g in outcome.gradients.values() if g.numel()), default=0.0)


def errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], largest: float) -> dict[str, float]:
    """Return the error of every tensor; infinite where shapes or names differ, or a NaN is."""
    result = {}
    for name in expected.keys() | found.keys():
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            result[name] = float("inf")
            continue
        a, b = found[name].double(), expected[name].double()
        if not b.numel():
            result[name] = 0.0
            continue
        error = float((a - b).abs().max()) / max(float(b.abs().max()), ZERO * largest, 1e-300)
        result[name] = float("inf") if math.isnan(error) else error
    return result


def worst_of(found: Outcome, expected: Outcome) -> dict[str, float]:
    """Return the largest error of each quantity, of which gradients that are only rounding are one."""
    mine = errors(found.tensors(), expected.tensors(), scale_of(expected))
    zeros = nothing_but_rounding(expected)
    weights = {f"state {name}" for name in found.gradients}
    result: dict[str, float] = {}
    for name, error in mine.items():
        if name in zeros:
            kind = ZERO_GRADIENT if name.startswith("gradient") else ZERO_STATISTIC
        elif name.startswith("gradient of input"):
            kind = "input gradient"
        elif name.startswith("gradient"):
            kind = "weight gradient"
        elif name == "loss":
            kind = "loss"
        else:
            kind = "weights" if name in weights else "statistics"
        result[kind] = max(result.get(kind, 0.0), error)
    return result


def nothing_but_rounding(expected: Outcome) -> set[str]:
    """Return the names of gradients and statistics that are zero in exact arithmetic."""
    bound = ZERO * scale_of(expected)
    named = {f"gradient of {name}": gradient for name, gradient in expected.gradients.items()}
    named |= {f"state {name}": t for name, t in expected.state.items() if name not in expected.gradients}
    return {
        name for name, tensor in named.items() if not tensor.numel() or float(tensor.abs().max()) <= bound
    }


def failures(found: Outcome, expected: Outcome, again: Sequence[Outcome] = ()) -> dict[str, float]:
    """Return the errors that are too large; `again` are other runs on one device, equal but for rounding."""
    largest = scale_of(expected)
    mine = errors(found.tensors(), expected.tensors(), largest)
    bad = {name: error for name, error in mine.items() if not error <= LIMIT}
    zeros = nothing_but_rounding(expected) & bad.keys()
    floors = [errors(other.tensors(), expected.tensors(), largest) for other in again] if zeros else []
    noise = {
        name
        for name in zeros
        if any(floor[name] <= FLOOR_LIMIT and bad[name] <= FLOOR_FACTOR * floor[name] for floor in floors)
    }
    return {name: error for name, error in bad.items() if name not in noise}
