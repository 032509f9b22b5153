"""What a rank did when: a list of spans, kept only when somebody asked for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One span on the clock of this process; a moment has equal ends."""

    kind: str
    what: str
    start: float
    end: float


class Recorder:
    """Record events; a recorder that is off costs a comparison."""

    def __init__(self, on: bool = False) -> None:
        self.on = on
        self.events: list[Event] = []

    @contextmanager
    def span(self, kind: str, what: object) -> Iterator[None]:
        """Record how long something took."""
        start = time.perf_counter()
        yield
        self.events.append(Event(kind, str(what), start, time.perf_counter()))

    def mark(self, kind: str, what: object) -> None:
        """Record a moment."""
        if self.on:
            now = time.perf_counter()
            self.events.append(Event(kind, str(what), now, now))
