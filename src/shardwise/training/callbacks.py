"""Hooks into the training loop; they run on every rank, with the same numbers on all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.training.history import History
    from shardwise.training.trainer import Trainer


class Callback:
    """Do nothing at every hook; override the ones that you need."""

    def on_begin(self, trainer: Trainer) -> None:
        """Run before the first step."""

    def on_step(self, trainer: Trainer, step: int, loss: float) -> None:
        """Run after every step."""

    def on_epoch(self, trainer: Trainer, epoch: int, numbers: dict[str, float]) -> str | None:
        """Run after every epoch; return a reason to stop training, or None."""

    def on_end(self, trainer: Trainer, history: History) -> None:
        """Run when training is over."""


class EarlyStopping(Callback):
    """Stop when a number has not improved for some epochs.

    Args:
        monitor: the name of the number in the history.
        patience: how many epochs without improvement are allowed.
        min_delta: what counts as an improvement.
        mode: `min` or `max`.
    """

    def __init__(
        self, monitor: str = "val_loss", patience: int = 3, min_delta: float = 0.0, mode: str = "min"
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode: found {mode!r}; expected 'min' or 'max'")
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.sign = 1.0 if mode == "min" else -1.0
        self.best, self.waited = math.inf, 0

    def on_begin(self, trainer: Trainer) -> None:
        """Forget earlier runs."""
        self.best, self.waited = math.inf, 0

    def on_epoch(self, trainer: Trainer, epoch: int, numbers: dict[str, float]) -> str | None:
        """Compare with the best epoch so far."""
        if self.monitor not in numbers:
            known = ", ".join(numbers)
            raise ValueError(f"monitor: there is no {self.monitor!r} in the history; there are {known}")
        value = self.sign * numbers[self.monitor]
        if value < self.best - self.min_delta:
            self.best, self.waited = value, 0
            return None
        self.waited += 1
        if self.waited <= self.patience:
            return None
        return f"stopped after epoch {epoch + 1}: {self.monitor} has not improved for {self.waited} epochs"
