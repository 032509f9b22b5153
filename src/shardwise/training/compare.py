"""Put the measured step beside the predicted one after the first epoch, and say when the oracle missed."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from rich.console import Console

from shardwise.oracle import Prediction
from shardwise.oracle.prediction import seconds_text
from shardwise.runtime.memory import PeakWatch
from shardwise.training.callbacks import Callback

if TYPE_CHECKING:
    from shardwise.training.history import History
    from shardwise.training.trainer import Trainer

MISS = 0.15


@dataclass(frozen=True)
class Measured:
    """What the ranks of a run measured: the slowest rank's median step, the fullest rank's bytes."""

    step_seconds: float
    step_bytes: int


def comparison(predicted: Prediction, measured: Measured) -> str:
    """Return predicted and measured time and memory in words; a miss of more than 15 % is named."""
    pairs = (
        ("step time", predicted.step_seconds, measured.step_seconds, seconds_text),
        ("memory of a step", float(predicted.step_bytes), float(measured.step_bytes), _megabytes),
    )
    parts, misses = [], []
    for name, guess, truth, text in pairs:
        parts.append(f"{name} {text(guess)} predicted, {text(truth)} measured")
        off = abs(guess - truth) / truth if truth else 0.0
        if off > MISS:
            misses.append(f"the {name} by {100 * off:.0f} %")
    words = "; ".join(parts) + "."
    if misses:
        words += f" The oracle missed {' and '.join(misses)}: calibrate again, with the machine as it is now."
    return words


class Compare(Callback):
    """Measure steps of the first epoch (without its first two), and report at its end on rank 0.

    The second step is watched for its memory, so its time does not count.
    """

    def __init__(self, prediction: Prediction, show: bool = True) -> None:
        self.prediction, self.show = prediction, show
        self.words = ""
        self._watch: PeakWatch | None = None
        self._bytes = 0
        self._seconds: list[float] = []

    def on_begin(self, trainer: Trainer) -> None:
        """Let the trainer know what to expect."""
        trainer.prediction = self.prediction

    def on_step(self, trainer: Trainer, step: int, loss: float) -> None:
        """Watch the memory of the second step, take the time of those behind it."""
        if trainer.measured is not None:
            return
        if self._watch is not None:
            # Loading the mini-batch is no part of the step.
            start = time.time_ns() - int(1e9 * trainer.step_seconds[-1])
            self._bytes, self._watch = self._watch.stop(start).bytes, None
        elif not self._bytes:
            self._watch = PeakWatch(trainer.device)
            self._watch.start()
        else:
            self._seconds.append(trainer.step_seconds[-1])

    def on_epoch(self, trainer: Trainer, epoch: int, numbers: dict[str, float]) -> str | None:
        """Report once there is something to compare with."""
        if self._watch is not None:
            self._watch.stop()  # an epoch of one step: validation lies between, so the next one is watched
            self._watch = None
        if trainer.measured is None and self._seconds:
            mine = (statistics.median(self._seconds), self._bytes)
            every = [mine] * trainer.fabric.size
            if trainer.fabric.size > 1:
                dist.all_gather_object(every, mine)
            trainer.measured = Measured(max(t for t, _ in every), max(n for _, n in every))
            self.words = comparison(self.prediction, trainer.measured)
            if self.show and trainer.fabric.rank == 0:
                Console(stderr=True, soft_wrap=True, highlight=False).print(self.words)
        return None

    def on_end(self, trainer: Trainer, history: History) -> None:
        """Write both down in the history."""
        predicted = self.prediction
        history.predicted = {"step_seconds": predicted.step_seconds, "step_bytes": predicted.step_bytes}
        if trainer.measured is not None:
            history.measured = {name: float(value) for name, value in asdict(trainer.measured).items()}


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB"
