"""Callbacks under several ranks: all decide alike, one writes files, and what they read is up to date."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import callbacks as stock

# They write files or screens: rank 0 does.
WRITERS = (stock.ModelCheckpoint, stock.TensorBoard, stock.CSVLogger, stock.BackupAndRestore)
# They read the logs, the learning rate or this rank's own weights, never those of other ranks.
MODEST = (
    stock.EarlyStopping,
    stock.ReduceLROnPlateau,
    stock.LearningRateScheduler,
    stock.TerminateOnNaN,
    stock.CSVLogger,
    stock.History,
    stock.ProgbarLogger,
)


class Refresh(keras.callbacks.Callback):
    """Bring the weights to all ranks before others look at them."""

    def __init__(self, refresh: Callable[[], None], every: int | None) -> None:
        super().__init__()
        self.refresh, self.every = refresh, every
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Refresh where a callback saves in the middle of an epoch."""
        self.batches += 1
        if self.every is not None and self.batches % self.every == 0:
            self.refresh()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Refresh at the end of each epoch."""
        self.refresh()


class Agree(keras.callbacks.Callback):
    """Let all ranks start from what rank 0 has, and stop when it stops."""

    def __init__(self, begin: Callable[[], None], number: Callable[[float], float]) -> None:
        super().__init__()
        self.begin, self.number = begin, number

    def on_train_begin(self, logs: Any = None) -> None:
        """Take over the state of rank 0, which may have restored a backup."""
        self.begin()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Take over rank 0's decision to stop."""
        self.model.stop_training = bool(self.number(float(self.model.stop_training)))


def arranged(
    given: Sequence[Any], first: bool, refresh: Callable[[], None], agree: Agree, *, always: bool
) -> list[Any]:
    """Return the callbacks of this rank, in order; the same decisions are taken on all ranks."""
    if isinstance(given, stock.CallbackList):
        raise ValueError("callbacks: found a CallbackList; give the callbacks as a list")
    mine = [c for c in given if first or not isinstance(c, WRITERS)]
    result: list[Any] = []
    if always or any(not isinstance(c, MODEST) for c in given):
        every = [c.save_freq for c in given if isinstance(c, (stock.ModelCheckpoint, stock.BackupAndRestore))]
        batches = [n for n in every if isinstance(n, int)]
        result.append(Refresh(refresh, min(batches) if batches else None))
    return [*result, *mine, agree]
