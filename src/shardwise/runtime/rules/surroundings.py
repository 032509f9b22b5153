"""What a rule may know besides its tensors: the user's modules, and where in the training it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn


@dataclass
class Surroundings:
    """Tell rules where they are; one object serves all rules of a rank and changes from step to step.

    Args:
        modules: the user's modules by path, for layers that call one of them.
        seed: what random masks start from, the same on every rank.
        step: the number of steps so far.
        first_sample: position in the mini-batch of the first sample of the current micro-batch.
        samples: how many samples the current micro-batch has; 0 where nobody says.
        between: called between two computations where messages may be under way that need it, else None.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    seed: int = 0
    step: int = 0
    first_sample: int = 0
    samples: int = 0
    between: Callable[[], object] | None = None
