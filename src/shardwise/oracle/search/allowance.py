"""How much there is: memory for each rank, ranks on a machine; and what is said where no plan has enough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.machine import Machine
from shardwise.plan import Plan

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Allowance:
    """The bytes that a rank may use.

    Args:
        machine: whose memory it is; ranks that share a host have the more of it the fewer they are.
        given: bytes for each rank, however many there are, instead of what the machine has.
    """

    machine: Machine
    given: float | None = None

    def of(self, ranks: int) -> float:
        """Return what each of so many ranks may use."""
        return self.given or self.machine.memory_per_rank(ranks)

    def of_each(self, ranks: Floats) -> Floats:
        """Return the same for the ranks of many plans."""
        distinct, where = np.unique(ranks, return_inverse=True)
        return np.array([self.of(int(count)) for count in distinct.tolist()])[where.reshape(-1)]


@dataclass(frozen=True)
class Nearest:
    """The plan that needs least of what it has."""

    plan: Plan
    needed: float
    limit: float

    @property
    def excess(self) -> float:
        """Return how many times as much it needs as there is."""
        return self.needed / self.limit

    def __str__(self) -> str:
        more = f"{self.plan.ranks} ranks" if self.plan.ranks > 1 else "one rank"
        return (
            f"the nearest plan is {self.plan} ({more}): a rank needs {self.needed / 1e9:.3g} GB of "
            f"{self.limit / 1e9:.3g} GB. Ask for more ranks (`--find fewest-ranks` says how many are enough) "
            "or for a smaller mini-batch or smaller images (`--find largest-batch`, `--find largest-image`)"
        )


def check_ranks(machine: Machine, ranks: int) -> None:
    """Refuse more ranks than the machine has."""
    if ranks < 1:
        raise ValueError(f"ranks: {ranks} found; at least 1")
    if machine.most_ranks and ranks > machine.most_ranks:
        raise ValueError(
            f"ranks: {ranks} asked for, {machine.name} has {machine.most_ranks} "
            f"({machine.nodes} nodes of {machine.node.devices}); ask for {machine.most_ranks} or fewer"
        )
