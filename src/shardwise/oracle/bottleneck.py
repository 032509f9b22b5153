"""Find what limits a step by asking what a better machine would save."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from shardwise.machine import Curve, Link, Machine, Tier
from shardwise.oracle.events import BUBBLE, Event, Span, Speed, end_of, simulate

Lists = Mapping[int, Sequence[Event]]

# What could be twice as fast, in words, and the categories of events that it touches.
REMEDIES = {
    "twice the compute speed": ("forward", "backward"),
    "twice the speed of the optimizer": ("update",),
    "twice the input rate": ("input",),
}
_MESSAGES = {"halo", "statistics", "stage transfer", "reduction"}
_NAMES = {
    "halo": "halo exchanges",
    "statistics": "batch-norm reductions",
    "stage transfer": "stage transfers",
    "reduction": "gradient reduction",
}


def explain(
    lists: Lists,
    spans: Sequence[Span],
    machine: Machine,
    seconds_on: Callable[[Machine], float],
    *,
    cores: int,
    ranks_per_node: int,
    jitter: Curve | None = None,
    paces: Mapping[int, Speed] | None = None,
) -> str:
    """Return what the busiest rank spends most time on, which remedy would save most, and which comes next.

    Args:
        lists: the events of every rank.
        spans: what each of them does when.
        machine: what they run on.
        seconds_on: the step's seconds on a machine with another network.
        cores: of a node, if ranks share them, else 0.
        ranks_per_node: how many ranks share the cores.
        jitter: by which part of their work ranks that meet are late, over the seconds of it.
        paces: how fast each rank is beside others.
    """
    step = end_of(spans)
    present = {event.category for events in lists.values() for event in events}
    savings = []
    for words, categories in REMEDIES.items():
        if step > 0 and present & set(categories):
            again = _replayed(lists, cores, categories, ranks_per_node, paces, jitter)
            savings.append((1 - again / step, words))
    if step > 0 and present & _MESSAGES:
        for words, better in _networks(machine):
            savings.append((1 - seconds_on(better) / step, words))
    savings = sorted((pair for pair in savings if pair[0] > 0.005), reverse=True)
    if not savings:
        return "Nothing on its own limits the step."
    text = f"{_limit(spans)}: {savings[0][1]} saves {100 * savings[0][0]:.0f} %"
    if len(savings) > 1:
        text += f", {savings[1][1]} {100 * savings[1][0]:.0f} %"
    return text + "."


def _limit(spans: Sequence[Span]) -> str:
    """Name what the rank that waits least for others spends most of its time on."""
    totals: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.category != BUBBLE:
            name = "computation" if span.category in ("forward", "backward") else span.category
            totals[span.rank][name] += span.end - span.start
    busiest = max(totals.values(), key=lambda mine: sum(mine.values()))
    largest = max(busiest, key=busiest.__getitem__)
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
    return end_of(spans)
