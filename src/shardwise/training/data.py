"""Mini-batches for a rank: the same global order everywhere, and only the samples that this rank needs.

epoch's order   [17 4 9 | 2 11 0 | 5 ...]     one permutation of the seed and the epoch, on every rank
mini-batch          2 11 0                    its samples are numbered 0, 1, 2
replica 1                0                    loads sample 2 alone; the middle of a pipeline none
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from shardwise.graph import Graph
from shardwise.graph.trace import leaves
from shardwise.runtime.counts import Feed
from shardwise.training.draws import kept_draws, seed_draws
from shardwise.training.feeds import samples_feed
from shardwise.training.order import Followed

Shapes = tuple[tuple[int, ...], ...]
# The number of a sample in the order of the epoch, and its index in the dataset.
Numbered = tuple[int, Any]
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
        told: returns rank 0's value on every rank; None on a rank that is alone.
    """

    graph: Graph
    flatten: Flatten
    positions: Callable[[Shapes], Sequence[int]]
    shapes: Shapes
    told: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Source:
    """A dataset with numbered samples, and how they are put together.

    Args:
        data: the dataset.
        batch_size: samples of a global mini-batch, or of the largest one.
        shuffle: whether each epoch has its own order.
        drop_last: whether to leave out a last mini-batch that is smaller.
        collate: makes a mini-batch of a list of samples.
        workers: processes that load samples for this rank.
        varying_sizes: whether sizes differ between mini-batches; then every rank loads at least one sample
            of each, to know them, and all of them if `collate` decides on sizes or `workers` load ahead.
        followed: the user's own order, instead of `batch_size`, `shuffle` and `drop_last`.
    """

    data: Any
    batch_size: int
    shuffle: bool = False
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0
    varying_sizes: bool = False
    followed: Followed | None = None

    @property
    def steps(self) -> int:
        """Return the number of mini-batches of an epoch."""
        if self.followed is not None:
            return self.followed.steps
        count = len(self.data) / self.batch_size
        return int(count) if self.drop_last else math.ceil(count)

    def check_epochs(self, epochs: int) -> None:
        """Accept any number of epochs."""

    def first(self) -> tuple[Any, Any]:
        """Return a mini-batch of two samples at most as an example; every rank sees the same."""
        indices = range(len(self.data)) if self.followed is None else self.followed.example
        if not len(indices):
            raise ValueError("data: there were no samples")
        x, y = _Picked(self.data, self.collate, (0, 0))[list(enumerate(indices[: min(self.batch_size, 2)]))]
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
        lists = self._numbered(reader, seed, epoch)
        picked = _Picked(self.data, self.collate, None if reader.told is None else (seed, epoch))
        if self.varying_sizes and not everything and self._can_probe:
            yield from self._probed(reader, lists, picked)
            return
        wanted = [self._wanted(reader, len(batch), everything) for batch in lists]
        loader: Iterable[Any] = DataLoader(
            picked,
            sampler=[[batch[p] for p in chosen] for batch, chosen in zip(lists, wanted, strict=True)],
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_as_it_is,
        )
        for batch, chosen, loaded in zip(lists, wanted, loader, strict=True):
            yield self._batch(reader, len(batch), chosen, loaded)

    def _numbered(self, reader: Reader, seed: int, epoch: int) -> list[list[Numbered]]:
        """Return the numbered samples of each mini-batch of an epoch, the same on every rank."""
        if self.followed is not None:
            lists = self.followed.lists(seed, epoch)
            # A sampler may draw from a generator of its own, which no seed of ours reaches.
            lists = lists if reader.told is None else reader.told(lists)
        else:
            order = list(range(len(self.data)))
            if self.shuffle:
                generator = torch.Generator().manual_seed(seed + epoch)
                order = torch.randperm(len(order), generator=generator).tolist()
            lists = [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(self.steps)]
        numbers = itertools.count()
        return [[(next(numbers), index) for index in batch] for batch in lists]

    @property
    def _can_probe(self) -> bool:
        """Tell whether one sample shows the sizes of a mini-batch, and nothing is loaded ahead."""
        return self.collate is default_collate and not self.workers

    def _probed(self, reader: Reader, lists: Sequence[list[Numbered]], picked: _Picked) -> Iterator[Batch]:
        """Load one sample of each mini-batch to know its sizes, then what this rank needs of it."""
        for batch in lists:
            probe = picked.samples(batch[:1])
            tensors = reader.flatten(*self.collate(probe))
            shapes = resized(tuple(tuple(t.shape) for t in tensors), len(batch))
            # A rank that needs no sample still has to know the sizes.
            chosen = sorted(reader.positions(shapes)) or [0]
            rest = picked.samples([batch[p] for p in chosen if p])
            loaded = self.collate([*(probe if chosen[0] == 0 else ()), *rest])
            yield self._batch(reader, len(batch), chosen, loaded)

    def _wanted(self, reader: Reader, samples: int, everything: bool) -> list[int]:
        if self.varying_sizes:
            # What is needed is known only when the size is.
            return list(range(samples))
        # Asking is collective, so a rank that loads everything asks too.
        needed = sorted(reader.positions(resized(reader.shapes, samples)))
        return list(range(samples)) if everything else needed

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
    """Load a list of samples at once, here or in a worker; an empty list is no mini-batch.

    Args:
        data, collate: see `Source`.
        key: what, with the number of a sample, its random draws follow from; None to let them be.
    """

    def __init__(self, data: Any, collate: Callable[[list[Any]], Any], key: tuple[int, int] | None) -> None:
        self.data, self.collate, self.key = data, collate, key

    def samples(self, chosen: Sequence[Numbered]) -> list[Any]:
        """Return some samples."""
        with self._kept():
            return self._read(chosen)

    def __getitem__(self, chosen: Sequence[Numbered]) -> Any:
        if not chosen:
            return None
        with self._kept():
            # What `collate` draws follows from the last sample.
            return self.collate(self._read(chosen))

    def _kept(self) -> AbstractContextManager[None]:
        return nullcontext() if self.key is None else kept_draws()

    def _read(self, chosen: Sequence[Numbered]) -> list[Any]:
        result = []
        for number, index in chosen:
            if self.key is not None:
                seed_draws(*self.key, number)
            result.append(self.data[index])
        return result


def _as_it_is(loaded: Any) -> Any:
    return loaded


def resized(shapes: Shapes, samples: int) -> Shapes:
    """Return shapes with another number of samples."""
    return tuple((samples, *shape[1:]) for shape in shapes)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a structure in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]
