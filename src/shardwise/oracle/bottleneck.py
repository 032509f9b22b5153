"""Find what limits a step by asking what a better machine would save."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from shardwise.oracle.events import Event, simulate

# What could be twice as fast, in words, and the categories of events that it touches.
REMEDIES = {
    "twice the compute speed": ("forward", "backward"),
    "twice the speed of halo exchanges": ("halo",),
    "twice the speed of batch-norm reductions": ("statistics",),
    "twice the speed between stages": ("stage transfer",),
    "twice the speed of gradient reduction": ("reduction",),
    "twice the speed of the optimizer": ("update",),
    "twice the input rate": ("input",),
}


def explain(lists: Mapping[int, Sequence[Event]], cores: int, step: float) -> str:
    """Return which remedy would save most of the step, and which comes next.

    Args:
        lists: the events of every rank.
        cores: of a node, if ranks share them, else 0.
        step: seconds as predicted.
    """
    present = {event.category for events in lists.values() for event in events}
    savings = []
    for words, categories in REMEDIES.items():
        if step > 0 and present & set(categories):
            saved = 1 - _replayed(lists, cores, categories) / step
            if saved > 0.005:
                savings.append((saved, words, categories))
    if not savings:
        return "Nothing on its own limits the step."
    savings.sort(reverse=True)
    saved, words, categories = savings[0]
    text = f"Limited by {' and '.join(categories)}: {words} saves {100 * saved:.0f} %"
    if len(savings) > 1:
        text += f", {savings[1][1]} {100 * savings[1][0]:.0f} %"
    return text + "."


def _replayed(lists: Mapping[int, Sequence[Event]], cores: int, categories: tuple[str, ...]) -> float:
    """Return the seconds of the step with some categories twice as fast."""

    def halved(event: Event) -> Event:
        if event.category not in categories:
            return event
        return dataclasses.replace(event, seconds=event.seconds / 2, flight=event.flight / 2)

    changed = {rank: [halved(event) for event in events] for rank, events in lists.items()}
    return max((span.end for span in simulate(changed, cores=cores)), default=0.0)
