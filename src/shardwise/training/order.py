"""The order that the user's own sampler gives, asked once for each epoch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardwise.training.draws import kept_draws, seed_draws

Lists = list[list[Any]]


class Followed:
    """Take the mini-batches of a batch sampler as it gives them.

    Args:
        sampler: an iterable of lists of indices.
        seed: what the first epoch's random draws follow from.
    """

    def __init__(self, sampler: Iterable[Iterable[Any]], seed: int = 0) -> None:
        self._sampler = sampler
        # What an example is made of is asked for before the first epoch; a sampler may count how often it is.
        self._ahead: Lists | None = self._ask(seed, 0)
        if not self._ahead:
            raise ValueError("data: the sampler of the DataLoader gives no samples")
        self.example = self._ahead[0]
        self.largest = max(map(len, self._ahead))
        self.steps = len(self._ahead)

    def lists(self, seed: int, epoch: int) -> Lists:
        """Return the indices of each mini-batch of an epoch."""
        ahead, self._ahead = self._ahead, None
        return ahead if ahead is not None else self._ask(seed, epoch)

    def _ask(self, seed: int, epoch: int) -> Lists:
        with kept_draws():
            seed_draws(seed, epoch)
            return [list(batch) for batch in self._sampler]
