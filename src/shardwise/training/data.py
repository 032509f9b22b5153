"""Mini-batches for a rank: the same global order everywhere, and only the samples that this rank needs.

epoch's order   [17 4 9 | 2 11 0 | 5 ...]     one permutation of the seed and the epoch, on every rank
mini-batch          2 11 0                    its samples are numbered 0, 1, 2
replica 1                0                    loads sample 2 alone; the middle of a pipeline none
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, default_collate

from shardwise.graph import Graph
from shardwise.graph.trace import leaves
from shardwise.runtime.counts import Feed
from shardwise.training.feeds import samples_feed, whole_feed

Shapes = tuple[tuple[int, ...], ...]
Flatten = Callable[[Any, Any], list[Tensor]]


@dataclass(frozen=True)
class Batch:
    """One mini-batch as a rank sees it.

    Args:
        samples: how many it has, over all ranks.
        shapes: the global shapes of its inputs and targets.
        feed: gives this rank's boxes of them.
        inputs, target: all of them as the user's data gave them, where this rank has all samples.
    """

    samples: int
    shapes: Shapes
    feed: Feed
    inputs: Any = None
    target: Any = None


@dataclass(frozen=True)
class Reader:
    """What a rank reads of mini-batches.

    Args:
        graph: the network whose inputs come first, targets behind them.
        flatten: turns (x, y) into the tensors in the order of the graph's inputs.
        positions: returns which samples of a mini-batch of given shapes this rank needs.
        shapes: shapes of the inputs and targets of an example.
    """

    graph: Graph
    flatten: Flatten
    positions: Callable[[Shapes], Sequence[int]]
    shapes: Shapes


@dataclass(frozen=True)
class Source:
    """Where samples come from, and how they are put together.

    Args:
        data: a dataset with numbered samples, or an iterable of whole mini-batches.
        batch_size: samples of a global mini-batch; None for an iterable of them.
        shuffle: whether each epoch has its own order.
        drop_last: whether to leave out a last mini-batch that is smaller.
        collate: makes a mini-batch of a list of samples.
        workers: processes that load samples for this rank.
        varying_sizes: whether sizes differ between mini-batches; then every rank loads at least one sample
            of each, to know them, and all of them if `collate` decides on sizes or `workers` load ahead.
    """

    data: Any
    batch_size: int | None = None
    shuffle: bool = False
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0
    varying_sizes: bool = False

    @staticmethod
    def of(data: Any, batch_size: int | None, **settings: Any) -> Source:
        """Return the source of what the user gave: a Dataset, a DataLoader or an iterable of (x, y)."""
        if isinstance(data, DataLoader):
            plain = isinstance(data.sampler, (RandomSampler, SequentialSampler)) and data.batch_size
            if not plain:
                return Source(data)
            settings["shuffle"] = isinstance(data.sampler, RandomSampler)
            settings |= {"drop_last": data.drop_last, "collate": data.collate_fn, "workers": data.num_workers}
            return Source(data.dataset, data.batch_size, **settings)
        if isinstance(data, Dataset) or (isinstance(data, Sequence) and batch_size is not None):
            if batch_size is None:
                raise ValueError("batch_size: a Dataset needs one, the samples of a global mini-batch")
            return Source(data, batch_size, **settings)
        return Source(data)

    def __len__(self) -> int:
        """Return the number of mini-batches of an epoch."""
        if self.batch_size is None:
            return len(self.data)
        count = len(self.data) / self.batch_size
        return int(count) if self.drop_last else math.ceil(count)

    def first(self) -> tuple[Any, Any]:
        """Return one mini-batch as an example; every rank sees the same."""
        if self.batch_size is None:
            x, y = next(iter(self.data))
        else:
            x, y = self.collate([self.data[i] for i in range(min(self.batch_size, len(self.data), 2))])
        return x, y

    def batches(
        self, reader: Reader, epoch: int = 0, seed: int = 0, everything: bool = False
    ) -> Iterator[Batch]:
        """Yield the mini-batches of an epoch, each with what this rank needs of it.

        Args:
            reader: says what this rank needs.
            epoch, seed: what the order follows from.
            everything: load all samples, to know all targets.
        """
        if self.batch_size is None:
            torch.manual_seed(seed + epoch)
            yield from _whole(self.data, reader)
            return
        order = list(range(len(self.data)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(seed + epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        lists = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        lists = lists[: len(self)]
        if self.varying_sizes and not everything and self._can_probe:
            yield from self._probed(reader, lists)
            return
        wanted = [self._wanted(reader, len(batch), everything) for batch in lists]
        loader: Iterable[Any] = DataLoader(
            _Picked(self.data, self.collate),
            sampler=[[batch[p] for p in chosen] for batch, chosen in zip(lists, wanted, strict=True)],
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_as_it_is,
        )
        for batch, chosen, loaded in zip(lists, wanted, loader, strict=True):
            yield self._batch(reader, len(batch), chosen, loaded)

    @property
    def _can_probe(self) -> bool:
        """Tell whether one sample shows the sizes of a mini-batch, and nothing is loaded ahead."""
        return self.collate is default_collate and not self.workers

    def _probed(self, reader: Reader, lists: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """Load one sample of each mini-batch to know its sizes, then what this rank needs of it."""
        for batch in lists:
            probe = self.data[batch[0]]
            tensors = reader.flatten(*self.collate([probe]))
            shapes = resized(tuple(tuple(t.shape) for t in tensors), len(batch))
            # A rank that needs no sample still has to know the sizes.
            chosen = sorted(reader.positions(shapes)) or [0]
            loaded = self.collate([self.data[batch[p]] if p else probe for p in chosen])
            yield self._batch(reader, len(batch), chosen, loaded)

    def _wanted(self, reader: Reader, samples: int, everything: bool) -> list[int]:
        if everything or self.varying_sizes:
            # With varying sizes what is needed is known only when the size is.
            return list(range(samples))
        return sorted(reader.positions(resized(reader.shapes, samples)))

    def _batch(self, reader: Reader, samples: int, chosen: Sequence[int], loaded: Any) -> Batch:
        if loaded is None:
            shapes = resized(reader.shapes, samples)
            nothing = [torch.empty((0, *shape[1:])) for shape in shapes]
            return Batch(samples, shapes, samples_feed(reader.graph, (), nothing))
        x, y = loaded
        tensors = reader.flatten(x, y)
        shapes = tuple((samples, *t.shape[1:]) for t in tensors)
        if not self.varying_sizes and shapes != resized(reader.shapes, samples):
            raise ValueError(
                f"data: a mini-batch of shapes {shapes} after an example of {reader.shapes}; "
                "sizes that differ between mini-batches need varying_sizes=True"
            )
        given = (x, y) if len(chosen) == samples else ()
        return Batch(samples, shapes, samples_feed(reader.graph, chosen, tensors), *given)


class _Picked(Dataset[Any]):
    """Load a list of samples at once; an empty list is no mini-batch."""

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.data, self.collate = data, collate

    def __getitem__(self, chosen: list[int]) -> Any:
        return self.collate([self.data[i] for i in chosen]) if chosen else None


def _as_it_is(loaded: Any) -> Any:
    return loaded


def _whole(data: Iterable[Any], reader: Reader) -> Iterator[Batch]:
    for x, y in data:
        tensors = reader.flatten(x, y)
        shapes = tuple(tuple(t.shape) for t in tensors)
        yield Batch(shapes[0][0], shapes, whole_feed(reader.graph, tensors), x, y)


def resized(shapes: Shapes, samples: int) -> Shapes:
    """Return shapes with another number of samples."""
    return tuple((samples, *shape[1:]) for shape in shapes)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a structure in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
