"""Mini-batches as they come: an iterable of whole ones, which every rank goes through alike."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count
from typing import Any

from shardwise.training.data import Batch, Reader
from shardwise.training.draws import kept_draws, seed_draws
from shardwise.training.feeds import whole_feed


class Stream:
    """Read whole mini-batches `(x, y)` from an iterable, or once from an iterator.

    Args:
        data: the iterable.
        seed: what random draws of the first epoch follow from.
        what: the argument of the user that it came from, for messages.
    """

    batch_size = None

    def __init__(self, data: Any, seed: int = 0, what: str = "data") -> None:
        self.data, self.seed, self.what = data, seed, what
        self._begun: Iterator[tuple[Any, Any]] | None = None

    @property
    def steps(self) -> int | None:
        """Return the number of mini-batches of an epoch, if it is known."""
        try:
            return len(self.data)
        except TypeError:
            return None

    def check_epochs(self, epochs: int) -> None:
        """Refuse to go more than once through what can be gone through once."""
        if epochs > 1 and isinstance(self.data, Iterator):
            raise ValueError(
                f"{self.what}: found a {type(self.data).__name__}, which gives its mini-batches once, and "
                f"epochs={epochs}; give a list, a DataLoader or an object whose __iter__ begins anew"
            )

    def first(self) -> tuple[Any, Any]:
        """Return the first mini-batch as an example."""
        begun = _drawn(self.data, self.seed, 0)
        try:
            example = next(begun)
        except StopIteration:
            raise ValueError(f"{self.what}: there were no samples") from None
        # An iterator gives it only once, so the first epoch goes on from here.
        self._begun = chain([example], begun)
        return example

    def batches(
        self, reader: Reader, epoch: int = 0, seed: int = 0, everything: bool = False
    ) -> Iterator[Batch]:
        """Yield the mini-batches of an epoch, all of each on every rank."""
        begun, self._begun = self._begun, None
        for x, y in begun if begun is not None else _drawn(self.data, seed, epoch):
            tensors = reader.flatten(x, y)
            shapes = tuple(tuple(t.shape) for t in tensors)
            yield Batch(shapes[0][0], shapes, whole_feed(reader.graph, tensors), x, y)


def _drawn(data: Any, seed: int, epoch: int) -> Iterator[tuple[Any, Any]]:
    """Yield mini-batches whose random draws follow from the seed, the epoch and their number."""
    items: Iterator[Any] | None = None
    for number in count():
        with kept_draws():
            seed_draws(seed, epoch, number)
            # A loader draws its order, and the seeds of its workers, when it begins.
            items = iter(data) if items is None else items
            try:
                x, y = next(items)
            except StopIteration:
                return
        yield x, y
