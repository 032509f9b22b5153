"""Price the values and gradients that stages hand on: the message lists that the runtime sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.geometry import messages
from shardwise.machine import Machine
from shardwise.oracle.events import Event, Kind
from shardwise.oracle.price import tier_fields
from shardwise.program import StageProgram

TRANSFER = "stage transfer"
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Parcel:
    """All that one rank sends another of a value; `flight` goes on behind other work, `work` does not."""

    source: int
    target: int
    nbytes: float
    flight: float
    work: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """One value on its way between two groups: what each rank sends and receives, and copies by itself."""

    name: str
    parcels: tuple[Parcel, ...]
    packing: dict[int, float]
    unpacking: dict[int, float]
    received: dict[int, float]

    def sends(self, rank: int, key: Key) -> list[Event]:
        """Return what a rank does to send its parts."""
        mine = [p for p in self.parcels if p.source == rank]
        pack = self.packing.get(rank, 0.0) / max(1, len(mine))
        return [
            Event(Kind.SEND, pack, TRANSFER, self.name, (*key, p.source, p.target), flight=p.flight)
            for p in mine
        ]

    def receives(self, rank: int, key: Key) -> list[Event]:
        """Return what a rank does until it has its parts together."""
        mine = [p for p in self.parcels if p.target == rank]
        events = [Event(Kind.RECEIVE, p.work, TRANSFER, self.name, (*key, p.source, p.target)) for p in mine]
        if self.unpacking.get(rank):
            events.append(Event(Kind.WORK, self.unpacking[rank], TRANSFER, self.name))
        return events


def price_crossings(
    value: str,
    source: StageProgram,
    target: StageProgram,
    ends: tuple[Sequence[int], Sequence[int]],
    machine: Machine,
    fields: set[str],
    *,
    back: bool,
) -> tuple[Crossing, ...]:
    """Return one crossing for every way in which the target stage wants the value.

    Args:
        value: the name of what crosses.
        source, target: the two stages.
        ends: world ranks of the source group and of the target group.
        machine: for the times of messages.
        fields: the machine's fields that were used are added here.
        back: the gradient's way back.
    """
    made = source.departures[value].layout.on(ends[0])
    wanted = [held for held in target.arrivals.values() if held.value == value]
    result = []
    for held in wanted:
        there = held.layout.on(ends[1])
        pairs: dict[tuple[int, int], list[int]] = {}
        whole: dict[int, bool] = {}
        for m in messages(made, there):
            ranks = (m.target, m.source) if back else (m.source, m.target)
            pairs.setdefault(ranks, []).append(m.box.size * held.spec.itemsize)
            whole[ranks[1]] = ranks[1] not in whole and m.box == (made if back else there).box(ranks[1])
            whole.setdefault(-1 - ranks[0], True)
            whole[-1 - ranks[0]] &= m.box == (there if back else made).box(ranks[0])
        result.append(_crossing(value, pairs, whole, machine, fields))
    return tuple(result)


def _crossing(
    value: str,
    pairs: dict[tuple[int, int], list[int]],
    whole: dict[int, bool],
    machine: Machine,
    fields: set[str],
) -> Crossing:
    rate = machine.device.memory_bandwidth
    fields.add("device.memory_bandwidth")
    parcels: list[Parcel] = []
    packing: dict[int, float] = {}
    unpacking: dict[int, float] = {}
    received: dict[int, float] = {}
    span = machine.network[0].span
    leaving = Counter(a // span for a, b in pairs if machine.leaves_node(a, b))
    for (a, b), sizes in pairs.items():
        nbytes = sum(sizes)
        # A part of a tensor is packed before it leaves, and put in its place when it is there.
        if not whole[-1 - a]:
            packing[a] = packing.get(a, 0.0) + 2 * nbytes / rate
        if not whole[b]:
            unpacking[b] = unpacking.get(b, 0.0) + 3 * nbytes / rate
        received[b] = received.get(b, 0.0) + nbytes * (1 if whole[b] else 2)
        if a == b:
            continue
        tier = machine.tier((a, b))
        fields |= tier_fields(tier)
        flows = leaving[a // span] if machine.leaves_node(a, b) else 1
        seconds = sum(tier.message_seconds(size, flows) for size in sizes)
        flight = seconds * tier.overlap + machine.waking_seconds
        parcels.append(Parcel(a, b, nbytes, flight, seconds * (1 - tier.overlap)))
    return Crossing(value, tuple(parcels), packing, unpacking, received)
