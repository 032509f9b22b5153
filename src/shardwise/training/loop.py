"""The training loop: epochs of steps, validation, callbacks and a progress display on rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardwise.report.progress import Display
from shardwise.training.callbacks import Callback
from shardwise.training.data import Batch, Reader, Shapes, Source, tensors_in
from shardwise.training.feeds import input_tensors, needs_of
from shardwise.training.history import History
from shardwise.training.inference import named_metrics
from shardwise.training.moved import moved
from shardwise.training.stream import Stream
from shardwise.training.told import told
from shardwise.training.trainer import Trainer

Scheduler = Callable[[torch.optim.Optimizer], Any]
T = TypeVar("T")


class Loop:
    """Train for some epochs and keep the history."""

    def __init__(
        self,
        trainer: Trainer,
        source: Source | Stream,
        validation: Source | Stream | None = None,
        metrics: Any = None,
        callbacks: Sequence[Callback] = (),
        scheduler: Scheduler | None = None,
        scheduler_every: str = "epoch",
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        if scheduler_every not in ("epoch", "step"):
            raise ValueError(f"scheduler_every: found {scheduler_every!r}; expected 'epoch' or 'step'")
        if metrics and validation is None:
            raise ValueError("metrics: they are measured on the validation data, and none was given")
        self.trainer, self.source, self.validation = trainer, source, validation
        self.metrics, self.callbacks, self.seed = named_metrics(metrics), callbacks, seed
        made = (
            scheduler(trainer.optimizer) if scheduler is not None and trainer.optimizer is not None else None
        )
        self.scheduler: LRScheduler | ReduceLROnPlateau | None = made
        self.every = scheduler_every
        self.display = Display(progress and trainer.fabric.rank == 0)

    def run(self, epochs: int) -> History:
        """Train; every rank returns the same history."""
        trainer = self.trainer
        history = History(str(trainer.plan), trainer.fabric.size)
        for callback in self.callbacks:
            callback.on_begin(trainer)
        for note in trainer.notes:
            self.display.note(note)
        with self.display:
            for epoch in range(epochs):
                numbers = self._epoch(epoch, epochs)
                history.epochs.append(numbers)
                self.display.epoch(epoch, numbers)
                reasons = [callback.on_epoch(trainer, epoch, numbers) for callback in self.callbacks]
                # A callback may look at a clock or a file, which are other ones on every rank.
                history.stopped = self._told(next((reason for reason in reasons if reason), ""))
                if history.stopped:
                    break
        for callback in self.callbacks:
            callback.on_end(trainer, history)
        return history

    def _epoch(self, epoch: int, epochs: int) -> dict[str, float]:
        start, total, samples = time.perf_counter(), 0.0, 0
        # Without a total the bar only counts.
        self.display.start(f"epoch {epoch + 1}/{epochs}", cast(int, self.source.steps))
        for number, (count, loss) in enumerate(self._steps(epoch)):
            total, samples = total + loss * count, samples + count
            self._schedule("step", loss)
            self.display.step(loss)
            for callback in self.callbacks:
                callback.on_step(self.trainer, number, loss)
        if not samples:
            raise ValueError("data: there were no samples")
        seconds = self._told(time.perf_counter() - start)
        numbers = {"loss": total / samples, "seconds": seconds}
        if self.validation is not None:
            numbers |= {
                f"val_{k}": v for k, v in evaluate(self.trainer, self.validation, self.metrics).items()
            }
        self._schedule("epoch", numbers.get("val_loss", numbers["loss"]))
        return numbers

    def _told(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        return told(value, self.trainer.fabric, self.trainer.device)

    def _steps(self, epoch: int) -> Iterable[tuple[int, float]]:
        trainer, reader = self.trainer, training_reader(self.trainer)
        for batch in self._grouped(self.source.batches(reader, epoch, self.seed)):
            if trainer.is_plain:
                yield batch.samples, trainer.step(batch.inputs, batch.target)
            else:
                yield batch.samples, trainer.run(batch.shapes, batch.feed)

    def _grouped(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Let the mini-batches that an epoch leaves over make an update of their own."""
        asked = self.trainer.accumulate
        if asked == 1:
            yield from batches
            return
        # How many share an update has to be known before the first of them.
        while group := list(islice(batches, asked)):
            self.trainer.accumulate = len(group)
            yield from group
        self.trainer.accumulate = asked

    def _schedule(self, when: str, value: float) -> None:
        if self.scheduler is None or self.every != when:
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(value)
        else:
            self.scheduler.step()


def training_reader(trainer: Trainer) -> Reader:
    """Return what this rank reads of a mini-batch in training."""

    def flatten(x: Any, y: Any) -> list[Tensor]:
        return [*input_tensors(trainer.model, x), *tensors_in(y)]

    known: dict[Shapes, list[int]] = {}

    def positions(shapes: Shapes) -> list[int]:
        if shapes not in known:
            known[shapes] = _all(shapes) if trainer.is_plain else _samples(trainer.needs(shapes))
        return known[shapes]

    tell = partial(told, fabric=trainer.fabric, device=trainer.device) if trainer.fabric.size > 1 else None
    return Reader(trainer.graph, flatten, positions, trainer.graph.shapes, tell)


def evaluate(trainer: Trainer, source: Source | Stream, metrics: Any = None) -> dict[str, float]:
    """Return the mean loss and metrics over a source; rank 0 reads all targets, others what they need."""
    inference, count = trainer.inference, len(trainer.network.inputs)
    known: dict[Shapes, list[int]] = {}

    def positions(shapes: Shapes) -> list[int]:
        if shapes not in known:
            engine = None if trainer.is_plain else inference.engine(shapes[:count])
            known[shapes] = _all(shapes) if engine is None else _samples(needs_of(engine))
        return known[shapes]

    reader = replace(training_reader(trainer), positions=positions)
    first = trainer.fabric.rank == 0

    def results() -> Iterable[tuple[Any, Any, int]]:
        for batch in source.batches(reader, everything=first):
            if trainer.is_plain:
                outputs = inference.predict(moved(batch.inputs, trainer.device))
            else:
                outputs = inference.run(batch.shapes[:count], batch.feed, to=0)
            yield outputs, moved(batch.target, trainer.device), batch.samples

    return inference.measure(results(), metrics)


def _all(shapes: Shapes) -> list[int]:
    return list(range(shapes[0][0]))


def _samples(needs: Iterable[Any]) -> list[int]:
    """Return which samples of a mini-batch some needs fall on."""
    return sorted({s for need in needs if not need.box.empty for s in range(need.box.lo[0], need.box.hi[0])})
