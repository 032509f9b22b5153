"""Links, collectives and the tiers of a network."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.machine.curve import Curve, Points, check_points
from shardwise.machine.errors import MachineError


@dataclass(frozen=True, slots=True)
class Link:
    """Say how long a message takes: `latency + bytes / bandwidth`, or a measured table if there is one.

    `table` has (bytes, seconds) pairs of rising size. Between two of them time is linear in the bytes;
    beyond the last it goes on with the slope of the last pair.
    """

    latency_seconds: float
    bytes_per_second: float
    table: Points = ()

    def __post_init__(self) -> None:
        if self.latency_seconds < 0:
            raise MachineError("latency_seconds", f"{self.latency_seconds} found", "it cannot be negative")
        if self.bytes_per_second <= 0:
            raise MachineError("bytes_per_second", f"{self.bytes_per_second} found", "it must be positive")
        if self.table:
            check_points("table", self.table)

    def seconds(self, nbytes: float) -> float:
        """Return the time of one message alone on the link."""
        table = self.table
        if not table:
            return self.latency_seconds + nbytes / self.bytes_per_second
        if nbytes <= table[0][0] or len(table) == 1:
            return table[0][1]
        i = min(bisect_right(table, (nbytes, math.inf)), len(table) - 1)
        (x0, y0), (x1, y1) = table[i - 1], table[i]
        return y0 + max(0.0, y1 - y0) * (nbytes - x0) / (x1 - x0)

    @staticmethod
    def measured(before: Link | None, points: Points) -> Link:
        """Return a link from measurements, with what was known before of smaller messages."""
        known = before.table if before is not None else ()
        table = (*(point for point in known if point[0] < points[0][0]), *points)
        return Link(table[0][1], max(nbytes / seconds for nbytes, seconds in table), table)

    def scaled(self, factor: float) -> Link:
        """Return a link on which everything takes so many times as long."""
        table = tuple((nbytes, factor * seconds) for nbytes, seconds in self.table)
        return Link(factor * self.latency_seconds, self.bytes_per_second / factor, table)


@dataclass(frozen=True, slots=True)
class Collective:
    """Hold the measured time of one collective operation on a number of ranks."""

    name: str
    ranks: int
    link: Link


# Of `all_reduces` two are under way at a time, as of gradients; the time is that of one of many.
COLLECTIVES = ("all_reduce", "all_reduces", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class Tier:
    """Describe the network between ranks that share a node, a rack, a machine.

    Args:
        name: "node", "rack", "machine" ...
        span: the number of consecutive ranks that reach each other through this tier; 0 is all.
        point_to_point: one message in one direction.
        exchange: messages in both directions at once, as in a halo exchange; default: point to point.
        collectives: measured ones; those missing are derived from point to point.
        links: how many flows leave a node at full speed; more of them share. Counts without `contention`.
        contention: how many times as long the bytes of a flow take, over the number of flows that leave a
            node at once; measured with 1, 2, 4, ... pairs of ranks that exchange messages.
        overlap: measured fraction of a transfer that goes on behind computation.
        transport: the backend this was measured with or is meant for.
        crowd: how many ranks shared the node when this was measured; 0: it is meant for any number. With
            more ranks than cores a rank that waits must be woken, which takes longer.
        jitter: by which part ranks that meet are later than each of them alone would be, over the seconds
            that they worked before: equal work never takes equally long, and the slowest decides; who has
            to be woken is late by as much after a little work as after a lot.
        waiting_seconds: what a rank that waits for another takes of a core before it sleeps, where more
            ranks than cores were measured.
        waking_seconds: until such a rank is awake and has a core again.
    """

    name: str
    span: int
    point_to_point: Link
    exchange: Link | None = None
    collectives: tuple[Collective, ...] = ()
    links: int = 1
    contention: Curve | None = None
    overlap: float = 0.0
    transport: str = ""
    crowd: int = 0
    jitter: Curve | None = None
    waiting_seconds: float = 0.0
    waking_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.span < 0:
            raise MachineError(f"tiers.{self.name}.span", f"{self.span} found", "use 0 for all ranks")
        if self.links < 1:
            raise MachineError(f"tiers.{self.name}.links", f"{self.links} found", "at least one link")
        if not 0.0 <= self.overlap <= 1.0:
            raise MachineError(f"tiers.{self.name}.overlap", f"{self.overlap} found", "a fraction of 0 to 1")
        if self.jitter is not None and any(part < 0.0 for _, part in self.jitter.points):
            raise MachineError(
                f"tiers.{self.name}.jitter", f"{self.jitter.points} found", "fractions, 0 or more"
            )
        for name in ("waiting_seconds", "waking_seconds"):
            if getattr(self, name) < 0.0:
                raise MachineError(f"tiers.{self.name}.{name}", f"{getattr(self, name)} found", "0 or more")
        for collective in self.collectives:
            if collective.name not in COLLECTIVES:
                known = ", ".join(COLLECTIVES)
                raise MachineError(f"tiers.{self.name}.collectives", f"{collective.name!r} found", known)

    def summing(self, ranks: int, points: Points) -> Tier:
        """Return a tier on which so many ranks add up gradients of these sizes in these seconds."""
        name = "all_reduces"
        before = next((c.link for c in self.collectives if (c.name, c.ranks) == (name, ranks)), None)
        others = tuple(c for c in self.collectives if (c.name, c.ranks) != (name, ranks))
        found = Collective(name, ranks, Link.measured(before, points))
        return dataclasses.replace(self, collectives=(*others, found))

    def slowdown(self, flows: int) -> float:
        """Return how much longer a transfer takes when so many flows leave a node at once."""
        if flows <= 1:
            return 1.0
        if self.contention is not None:
            return max(1.0, self.contention.at(flows))
        return max(1.0, flows / self.links)

    def message_seconds(self, nbytes: float, flows: int = 1) -> float:
        """Return the time of one message when `flows` of them share the links of a node."""
        return _shared(self.point_to_point, nbytes, self.slowdown(flows))

    def exchange_seconds(self, nbytes: float, flows: int = 1) -> float:
        """Return the time of two messages of this size that cross each other."""
        return _shared(self.exchange or self.point_to_point, nbytes, self.slowdown(flows))

    def measured(self, name: str, ranks: int) -> Collective | None:
        """Return the measurement of a collective with the most similar number of ranks, if there is any."""
        known = [c for c in self.collectives if c.name == name]
        return min(known, key=lambda c: abs(math.log(c.ranks / ranks)), default=None)

    def collective_seconds(self, name: str, ranks: int, nbytes: float, flows: int = 1) -> float:
        """Return the time of a collective over a tensor of `nbytes` (the whole of it) on `ranks` ranks."""
        if ranks <= 1:
            return 0.0
        slow = self.slowdown(flows)
        near = self.measured(name, ranks)
        if near is None:
            link = self.point_to_point
            return _derived(name, ranks, nbytes, lambda b: _shared(link, b, slow))
        floor = near.link.seconds(0)
        rest = max(0.0, near.link.seconds(nbytes) - floor)
        # Small messages pay per round of a tree, large ones per byte that passes through a rank.
        rounds = math.ceil(math.log2(ranks)) / math.ceil(math.log2(near.ranks))
        volume = (1 - 1 / ranks) / (1 - 1 / near.ranks)
        return floor * rounds + rest * volume * slow


def _shared(link: Link, nbytes: float, slow: float) -> float:
    """Slow the bytes down, not the start-up."""
    if slow == 1.0:
        return link.seconds(nbytes)
    start = link.seconds(0)
    return start + (link.seconds(nbytes) - start) * slow


def _derived(name: str, ranks: int, nbytes: float, message: Callable[[float], float]) -> float:
    """Return the faster of ring and tree (ParaDL's Hockney forms), as communication libraries choose."""
    ring = (ranks - 1) * message(nbytes / ranks)
    tree = math.ceil(math.log2(ranks)) * message(nbytes)
    if name in ("all_reduce", "all_reduces"):
        return min(2 * ring, 2 * tree)
    return min(ring, tree) if name != "all_to_all" else ring
