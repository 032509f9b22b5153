"""Find what limits a step by asking what a better machine would save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from shardwise.machine import Curve, Link, Machine, Tier
from shardwise.oracle.events import Event, Speed, simulate

Lists = Mapping[int, Sequence[Event]]

# What could be twice as fast, in words, and the categories of events that it touches.
REMEDIES = {
    "twice the compute speed": ("forward", "backward"),
    "twice the speed of the optimizer": ("update",),
    "twice the input rate": ("input",),
}
# How long each kind of communication is, where only the events are known.
MESSAGES = {
    "twice the speed of halo exchanges": ("halo",),
    "twice the speed of batch-norm reductions": ("statistics",),
    "twice the speed between stages": ("stage transfer",),
    "twice the speed of gradient reduction": ("reduction",),
}
_NAMES = {
    "halo": "halo exchanges",
    "statistics": "batch-norm reductions",
    "stage transfer": "stage transfers",
}


def explain(
    lists: Lists,
    cores: int,
    step: float,
    ranks_per_node: int = 0,
    machine: Machine | None = None,
    seconds_on: Callable[[Machine], float] | None = None,
    jitter: Curve | None = None,
    paces: Mapping[int, Speed] | None = None,
) -> str:
    """Return what the slowest rank waits for most, which remedy would save most, and which comes next.

    Args:
        lists: the events of every rank.
        cores: of a node, if ranks share them, else 0.
        step: seconds as predicted.
        ranks_per_node: how many ranks share the cores; 0: all.
        machine: to ask for better networks, with
        seconds_on: the step's seconds on another machine.
        jitter: by which part of their work ranks that meet are late, over the seconds of it.
        paces: how fast each rank is beside others.
    """
    present = {event.category for events in lists.values() for event in events}
    remedies = dict(REMEDIES)
    if machine is None or seconds_on is None:
        remedies |= MESSAGES
    savings = []
    for words, categories in remedies.items():
        if step > 0 and present & set(categories):
            again = _replayed(lists, cores, categories, ranks_per_node, paces, jitter)
            savings.append((1 - again / step, words))
    if machine is not None and seconds_on is not None and step > 0 and present & set(_messages()):
        for words, better in _networks(machine):
            savings.append((1 - seconds_on(better) / step, words))
    savings = sorted((pair for pair in savings if pair[0] > 0.005), reverse=True)
    if not savings:
        return "Nothing on its own limits the step."
    text = f"{_limit(lists)}: {savings[0][1]} saves {100 * savings[0][0]:.0f} %"
    if len(savings) > 1:
        text += f", {savings[1][1]} {100 * savings[1][0]:.0f} %"
    return text + "."


def _messages() -> list[str]:
    return [category for categories in MESSAGES.values() for category in categories]


def _limit(lists: Lists) -> str:
    """Name what the busiest rank spends most of its time on."""
    totals: dict[str, float] = {}
    busiest = max(lists.values(), key=lambda events: sum(e.seconds for e in events))
    for event in busiest:
        name = "computation" if event.category in ("forward", "backward") else event.category
        totals[name] = totals.get(name, 0.0) + event.seconds
    largest = max(totals, key=totals.__getitem__)
    return f"Limited by {_NAMES.get(largest, largest)}"


def _networks(machine: Machine) -> list[tuple[str, Machine]]:
    """Return machines with one tier twice as good, with words."""
    result = []
    chosen = machine.network
    for tier in chosen:
        where = "within a node" if tier.name == "node" else "between nodes"
        if len(chosen) > 2 and tier.name not in ("node", "machine"):
            where = f"within a {tier.name}"
        for words, change in (
            (f"doubling the bandwidth {where}", _wider),
            (f"halving the latency {where}", _quicker),
        ):
            tiers = tuple(_changed(t, change) if t is tier else t for t in machine.tiers)
            result.append((words, dataclasses.replace(machine, tiers=tiers)))
    return result


def _changed(tier: Tier, change: Callable[[Link], Link]) -> Tier:
    return dataclasses.replace(
        tier,
        point_to_point=change(tier.point_to_point),
        exchange=change(tier.exchange) if tier.exchange else None,
        collectives=tuple(dataclasses.replace(c, link=change(c.link)) for c in tier.collectives),
    )


def _wider(link: Link) -> Link:
    first = link.table[0][1] if link.table else 0.0
    table = tuple((n, first + (t - first) / 2) for n, t in link.table)
    return Link(link.latency_seconds, 2 * link.bytes_per_second, table)


def _quicker(link: Link) -> Link:
    first = link.table[0][1] if link.table else 0.0
    table = tuple((n, t - first / 2) for n, t in link.table)
    return Link(link.latency_seconds / 2, link.bytes_per_second, table)


def _replayed(
    lists: Lists,
    cores: int,
    categories: tuple[str, ...],
    ranks_per_node: int,
    paces: Mapping[int, Speed] | None,
    jitter: Curve | None,
) -> float:
    """Return the seconds of the step with some categories twice as fast."""

    def halved(event: Event) -> Event:
        if event.category not in categories:
            return event
        return event._replace(seconds=event.seconds / 2, flight=event.flight / 2)

    changed = {rank: [halved(event) for event in events] for rank, events in lists.items()}
    spans = simulate(changed, cores=cores, ranks_per_node=ranks_per_node, paces=paces, jitter=jitter)
    return max((span.end for span in spans), default=0.0)
