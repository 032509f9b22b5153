"""Evaluation: forward passes of the network as it behaves in evaluation, gathered and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.graph import Graph, Literal
from shardwise.graph.trace import leaves, transform
from shardwise.program.lowered import lower
from shardwise.runtime.counts import Feed
from shardwise.runtime.engine import Engine
from shardwise.training.feeds import input_tensors, whole_feed
from shardwise.training.outputs import gather_output
from shardwise.training.stage_map import same_cuts
from shardwise.training.unsplit import call_model
from shardwise.training.whole_model import network_of

if TYPE_CHECKING:
    from shardwise.training.trainer import Trainer

Metric = Callable[[Any, Any], Any]
Shapes = tuple[tuple[int, ...], ...]


class Inference:
    """Run the trainer's network forwards only, with the trained weights where they are."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._graph: Graph | None = None
        self._engines: dict[Shapes, Engine] = {}

    @property
    def graph(self) -> Graph:
        """Return the network as it behaves in evaluation, captured when first needed."""
        if self._graph is None:
            self._graph = network_of(self.trainer.model, self.trainer.input_example, training=False)
        return self._graph

    def engine(self, shapes: Shapes) -> Engine:
        """Return what runs forward passes of these input shapes; collective when they are new."""
        if shapes not in self._engines:
            trainer = self.trainer
            cuts = same_cuts(trainer.graph, trainer.cuts or (), self.graph)
            lowered = lower(self.graph.at(*shapes), trainer.plan, cuts, training=False)
            self._engines[shapes] = Engine(lowered, trainer.bench)
        return self._engines[shapes]

    def predict(self, x: Any, to: int | None = None) -> Any:
        """Return the outputs for a global batch, whole on every rank, or on rank `to` alone."""
        if self.trainer.is_plain:
            return self._plainly(x)
        tensors = input_tensors(self.trainer.model, x)
        return self.run(tuple(tuple(t.shape) for t in tensors), whole_feed(self.graph, tensors), to)

    def _plainly(self, x: Any) -> Any:
        with evaluating(self.trainer.model), torch.no_grad():
            return call_model(self.trainer.model, x)

    def run(self, shapes: Shapes, feed: Feed, to: int | None = None) -> Any:
        """Return the outputs for what `feed` gives, whole: on every rank, or on rank `to` (else None)."""
        engine = self.engine(shapes)
        # Modules that run whole ask themselves how they are meant to behave.
        with evaluating(self.trainer.model):
            engine.step(feed)
        whole = {name: gather_output(engine, name, to) for name in engine.lowered.graph.output_names}

        def leaf(item: Any) -> Any:
            if isinstance(item, Literal):
                return item.value
            return whole[item] if isinstance(item, str) else item

        return transform(engine.lowered.graph.outputs, leaf)

    def evaluate(
        self,
        batches: Iterable[tuple[Any, Any]],
        metrics: Mapping[str, Metric] | Sequence[Metric] | None = None,
    ) -> dict[str, float]:
        """Return the mean loss and metrics over batches, each weighted by its samples."""
        return self.measure(((self.predict(x, 0), y, _samples(x)) for x, y in batches), metrics)

    def measure(
        self,
        results: Iterable[tuple[Any, Any, int]],
        metrics: Mapping[str, Metric] | Sequence[Metric] | None = None,
    ) -> dict[str, float]:
        """Average loss and metrics over (outputs, targets, samples); rank 0 computes them for all.

        Only rank 0 needs outputs and targets; they may be None elsewhere.
        """
        trainer = self.trainer
        named = {"loss": trainer.loss, **named_metrics(metrics)}
        totals = torch.zeros(len(named) + 1, dtype=torch.float64, device=trainer.device)
        with torch.no_grad():
            for output, target, samples in results:
                if trainer.fabric.rank == 0:
                    values = [float(metric(output, target)) for metric in named.values()]
                    totals += (
                        torch.tensor([*values, 1.0], dtype=torch.float64, device=trainer.device) * samples
                    )
        trainer.fabric.world.all_reduce(totals)
        if not totals[-1]:
            raise ValueError("evaluate: there were no samples")
        means = (totals[:-1] / totals[-1]).tolist()
        return dict(zip(named, means, strict=True))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Let a model behave as in evaluation for a while."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def named_metrics(metrics: Mapping[str, Metric] | Sequence[Metric] | None) -> dict[str, Metric]:
    """Return metrics by name; functions have their own."""
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        return dict(metrics)
    return {getattr(m, "__name__", type(m).__name__.lower()): m for m in metrics}


def _samples(x: Any) -> int:
    first = next(t for t in leaves(x) if isinstance(t, Tensor))
    return int(first.shape[0])


__all__ = ["Inference", "Metric", "named_metrics"]
