"""Which ranks of a job share a host, and who talks with whom to measure the network in and between hosts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

NODE, MACHINE = "node", "machine"


@dataclass(frozen=True)
class Reach:
    """What one tier of the network is measured with.

    Args:
        name: of the tier.
        span: of the tier: how many consecutive ranks it joins; 0 is all.
        members: the ranks that add up and gather together, from rank 0 upwards.
        pairs: ranks that exchange messages, the first pair alone, then more and more of them at once.
    """

    name: str
    span: int
    members: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]

    def peer(self, rank: int, pairs: int = 1) -> int | None:
        """Return with whom a rank exchanges messages while so many pairs do; None if it does not."""
        return next((a + b - rank for a, b in self.pairs[:pairs] if rank in (a, b)), None)

    @property
    def flows(self) -> tuple[int, ...]:
        """Return how many pairs exchange messages at once: 1, 2, 4, ... and all of them."""
        most = len(self.pairs)
        return tuple(sorted({2**i for i in range(most.bit_length())} | {most})) if most else ()


def host_name() -> str:
    """Return the host of this rank."""
    return socket.gethostname()


def reaches(hosts: Sequence[str]) -> tuple[Reach, ...]:
    """Return the tiers of a job's network from the inside out, given the host of every rank.

    On one host there is one. On several, rank 0's neighbours on its host measure the network inside a node,
    if it has any. Between nodes each rank of the first host talks with the one in its place on the next.
    """
    size, span = len(hosts), span_of(hosts)
    everyone = tuple(range(size))
    if span == size:
        return (Reach(NODE, 0, everyone, _neighbours(size)),)
    there = next(host for host in hosts if host != hosts[0])
    near, far = ([rank for rank in everyone if hosts[rank] == host] for host in (hosts[0], there))
    between = Reach(MACHINE, 0, everyone, tuple(zip(near, far, strict=False)))
    if span == 1:
        return (between,)
    return (Reach(NODE, span, everyone[:span], _neighbours(span)), between)


def span_of(hosts: Sequence[str]) -> int:
    """Return how many consecutive ranks, counted from rank 0, always share a host."""
    size = len(hosts)
    first = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), size)
    for span in range(first, 1, -1):
        if all(len(set(hosts[lo : lo + span])) == 1 for lo in range(0, size, span)):
            return span
    return 1


def _neighbours(size: int) -> tuple[tuple[int, int], ...]:
    return tuple((rank, rank + 1) for rank in range(0, size - 1, 2))
