"""Which source of mini-batches is meant by what the user gave."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from shardwise.training.data import Source
from shardwise.training.order import Followed
from shardwise.training.stream import Stream


def source_of(
    data: Any, batch_size: int | None, *, seed: int = 0, what: str = "data", **settings: Any
) -> Source | Stream:
    """Return the source of a Dataset, a DataLoader or an iterable of mini-batches `(x, y)`.

    Args:
        data: what the user gave.
        batch_size: samples of a global mini-batch, for a Dataset.
        seed: what random draws follow from.
        what: the name of the argument, for messages.
        settings: see `Source`.
    """
    if isinstance(data, DataLoader):
        return _of_loader(data, seed, what, settings)
    if isinstance(data, Dataset) or (isinstance(data, Sequence) and batch_size is not None):
        if batch_size is None:
            raise ValueError("batch_size: a Dataset needs one, the samples of a global mini-batch")
        if isinstance(data, IterableDataset):
            loading = {"drop_last": settings.get("drop_last", False), "num_workers": settings["workers"]}
            return Stream(DataLoader(data, batch_size, **loading), seed, what)
        return Source(data, batch_size, **settings)
    if not isinstance(data, Iterable):
        raise ValueError(
            f"{what}: found a {type(data).__name__}; "
            "expected a Dataset, a DataLoader or an iterable of mini-batches (x, y)"
        )
    return Stream(data, seed, what)


def _of_loader(loader: DataLoader[Any], seed: int, what: str, settings: dict[str, Any]) -> Source | Stream:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ValueError(
            f"{what}: found a DataLoader with a DistributedSampler, which gives each rank other samples; "
            "shardwise shares them out itself: give a DataLoader without it, such as "
            "DataLoader(dataset, batch_size, shuffle=True), the same on every rank"
        )
    own_loop = type(loader).__iter__ is not DataLoader.__iter__
    if own_loop or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return Stream(loader, seed, what)
    settings = settings | {
        "drop_last": loader.drop_last,
        "collate": loader.collate_fn,
        "workers": loader.num_workers,
    }
    if loader.batch_size is not None and _is_plain(loader):
        settings["shuffle"] = type(loader.sampler) is RandomSampler
        return Source(loader.dataset, loader.batch_size, **settings)
    order = Followed(loader.batch_sampler, seed)
    return Source(loader.dataset, order.largest, followed=order, **settings)


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Tell whether every sample comes once, in order or shuffled, in mini-batches of one size."""
    sampler: Any = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    if type(sampler) is RandomSampler:
        once = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    elif type(sampler) is SequentialSampler:
        once = True
    else:
        return False
    return once and sampler.data_source is loader.dataset
