"""Put the computations between two communications into one piece, as the runtime differentiates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.oracle.events import Event, Kind
from shardwise.oracle.kernels import Estimate
from shardwise.program import Compute, Op, Regrid

Events = tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """What a rank does in one operation: its events, the parts of them that can wait, and what they add up.

    `weight_seconds` only make gradients of weights, `later_seconds` come on top where there are some already.
    """

    there: Events
    back: Events = ()
    weight_seconds: float = 0.0
    later_seconds: float = 0.0
    noted: tuple[Estimate, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """The backward events of one rank up to the next communication.

    `ready` are the parameters whose gradients are complete behind it; `weight_seconds` is the part of its
    work that only makes gradients of weights, which some schedules put off; `later_seconds` come on top
    where gradients of weights are there already and are added to.
    """

    events: Events
    ready: tuple[str, ...]
    weight_seconds: float
    later_seconds: float = 0.0


def merged(events: Sequence[Event]) -> list[Event]:
    """Put computations that follow each other into one event."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if last and last.kind is event.kind is Kind.WORK and last.category == event.category:
            result[-1] = Event(Kind.WORK, last.seconds + event.seconds, event.category, last.label)
        else:
            result.append(event)
    return result


def last_uses(ops: Sequence[Op]) -> dict[int, tuple[str, ...]]:
    """Return for each operation the parameters that no earlier one reads: backward ends with them there."""
    seen: set[str] = set()
    result = {}
    for index, op in enumerate(ops):
        if not isinstance(op, Regrid):
            fresh = tuple(name for name in op.layer.parameters if name not in seen)
            seen.update(fresh)
            result[index] = fresh
    return result


def backward_runs(
    ops: Sequence[Op], ready: dict[int, tuple[str, ...]]
) -> list[tuple[range, tuple[str, ...]]]:
    """Return in the order of backward the operations that go in one piece, and what is ready behind each."""
    result = []
    index = len(ops) - 1
    while index >= 0:
        first = index
        if isinstance(ops[index], Compute):
            while first > 0 and isinstance(ops[first - 1], Compute):
                first -= 1
        run = range(index, first - 1, -1)
        result.append((run, tuple(name for i in run for name in ready.get(i, ()))))
        index = first - 1
    return result


def cut_backward(
    runs: Sequence[tuple[range, tuple[str, ...]]], mine: Sequence[Done], known: dict[tuple[int, ...], Segment]
) -> list[Segment]:
    """Cut a backward pass where the runtime does: a run of computations is differentiated in one go.

    Args:
        runs: of the stage.
        mine: what a rank does in each operation.
        known: segments of other ranks, by what they consist of.
    """
    result: list[Segment] = []
    for run, names in runs:
        parts = [mine[i] for i in run]
        key = tuple(map(id, parts))
        if key not in known:
            events = merged([event for done in parts for event in done.back])
            weights = sum(done.weight_seconds for done in parts)
            later = sum(done.later_seconds for done in parts)
            known[key] = Segment(tuple(events), names, weights, later)
        result.append(known[key])
    return result
