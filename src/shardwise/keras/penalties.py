"""Regularizers: a rank adds the gradients for the weights it holds; each weight counts once in the loss."""

from __future__ import annotations

from typing import Any

import keras
import torch
from torch import Tensor

from shardwise.geometry import Box
from shardwise.graph.keras.variables import Named
from shardwise.training.trainer import Trainer

_ELEMENTWISE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def reads_whole(regularizer: Any) -> bool:
    """Tell whether a regularizer needs a weight in one piece."""
    return regularizer is not None and not isinstance(regularizer, _ELEMENTWISE)


class Penalties:
    """The regularizers of the weights that this rank holds."""

    def __init__(self, trainer: Trainer, entries: list[Named]) -> None:
        self.trainer = trainer
        self.any = any(e.is_trained and e.variable.regularizer is not None for e in entries)
        self.held: list[tuple[Named, Tensor, bool]] = []
        for entry in entries:
            parameter = trainer.store.parameters.get(entry.name)
            if parameter is None or not entry.is_trained or entry.variable.regularizer is None:
                continue
            box = trainer.store.boxes[entry.name]
            cut = box != Box.whole(trainer.placement.shapes[entry.name])
            if cut and reads_whole(entry.variable.regularizer):
                raise ValueError(
                    f"{entry.name!r} is cut over ranks, but its regularizer "
                    f"{type(entry.variable.regularizer).__name__} reads it whole; use L1, L2, or another plan"
                )
            speaks = trainer.placement.owner(entry.name, box) == trainer.fabric.rank
            self.held.append((entry, parameter, speaks))
        self.value = torch.zeros((), dtype=torch.float64, device=trainer.device)

    def add(self) -> None:
        """Add to the gradients, and remember this rank's part of the value."""
        self.value.zero_()
        for entry, parameter, speaks in self.held:
            with torch.enable_grad():
                weight = parameter.detach().requires_grad_()
                penalty = self._penalty(entry, weight)
                (grad,) = torch.autograd.grad(penalty, weight)
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
            if speaks:
                self.value += penalty.detach().double()

    def measure(self) -> None:
        """Remember this rank's part of the value, without gradients."""
        self.value.zero_()
        with torch.no_grad():
            for entry, parameter, speaks in self.held:
                if speaks:
                    self.value += self._penalty(entry, parameter).double()

    def total(self) -> float:
        """Return the value of all regularizers; collective over the world."""
        if not self.any:
            return 0.0
        self.trainer.fabric.world.all_reduce(self.value)
        return float(self.value)

    @staticmethod
    def _penalty(entry: Named, weight: Tensor) -> Tensor:
        shape = tuple(entry.variable.shape)
        if weight.numel() == entry.variable.value.numel():
            weight = entry.view.invert(weight, shape)
        return torch.sum(entry.variable.regularizer(weight))
