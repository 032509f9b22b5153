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
# What is known to decide alike on all ranks, having the same logs; anything else may have a mind of its own.
PREDICTABLE = (*MODEST, *WRITERS)


class Refresh(keras.callbacks.Callback):
    """Bring the weights to all ranks before others look at them."""

    def __init__(self, refresh: Callable[[], None], every: int) -> None:
        super().__init__()
        self.refresh, self.every = refresh, every
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Refresh where a callback saves in the middle of an epoch."""
        self.batches += 1
        if self.every and self.batches % self.every == 0:
            self.refresh()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Refresh at the end of each epoch."""
        self.refresh()


class Agree(keras.callbacks.Callback):
    """Let all ranks start from what rank 0 has, train at its learning rate, and stop when any wants to.

    Args:
        begin: what happens first.
        together: returns whether any rank wishes something, and rank 0's value; collective.
        often: whether to ask after every mini-batch, since a callback may decide there.
    """

    def __init__(
        self, begin: Callable[[], None], together: Callable[[bool, float], tuple[bool, float]], often: bool
    ) -> None:
        super().__init__()
        self.begin, self.together, self.often = begin, together, often

    def on_train_begin(self, logs: Any = None) -> None:
        """Take over the state of rank 0, which may have restored a backup."""
        self.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Agree where a rank may want to stop in the middle of an epoch."""
        if self.often:
            self._agree()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree at the end of each epoch."""
        self._agree()

    def _agree(self) -> None:
        rate = self.model.optimizer._learning_rate
        own = float(rate.value) if isinstance(rate, keras.Variable) else 0.0
        self.model.stop_training, wanted = self.together(bool(self.model.stop_training), own)
        if own != wanted:
            rate.assign(wanted)


def wishes(given: Sequence[Any]) -> tuple[bool, bool, float]:
    """Tell whether callbacks may read all weights, whether they may stop a rank, and how often they save."""
    if isinstance(given, stock.CallbackList):
        raise ValueError("callbacks: found a CallbackList; give the callbacks as a list")
    savers = [c.save_freq for c in given if isinstance(c, (stock.ModelCheckpoint, stock.BackupAndRestore))]
    batches = [n for n in savers if isinstance(n, int)]
    reads = any(not isinstance(c, MODEST) for c in given)
    return reads, any(type(c) not in PREDICTABLE for c in given), float(min(batches, default=0))


def arranged(given: Sequence[Any], first: bool, refresh: Refresh | None, agree: Agree) -> list[Any]:
    """Return the callbacks of this rank, in order; the same decisions are taken on all ranks."""
    mine = [c for c in given if first or not isinstance(c, WRITERS)]
    return [*([] if refresh is None else [refresh]), *mine, agree]
