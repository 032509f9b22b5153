"""The answer of a search: plans best first, what was refused and why, and how many were looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.oracle.prediction import Prediction, seconds_text
from shardwise.plan import Plan


@dataclass(frozen=True)
class Entry:
    """One plan with what the search found; `prediction` is worked out in full when it is asked for.

    `memory_bytes` are those that each of its ranks may use.
    """

    plan: Plan
    step_seconds: float
    batch: int
    peak_bytes: float
    ranks: int
    ask: Callable[[Plan], Prediction] = field(repr=False, compare=False)
    words: str = ""
    memory_bytes: float = float("inf")

    @property
    def samples_per_second(self) -> float:
        """Return the throughput."""
        return self.batch / self.step_seconds if self.step_seconds else float("inf")

    @property
    def cost(self) -> float:
        """Return the device-seconds of one step."""
        return self.ranks * self.step_seconds

    def score(self, objective: str) -> float:
        """Return how good the plan is; lower is better."""
        return {"time": self.step_seconds, "memory": self.peak_bytes, "cost": self.cost}[objective]

    @property
    def bottleneck(self) -> str:
        """Say what limits the step: in the search's own words, or from the full prediction."""
        return self.words or self.prediction.bottleneck

    @cached_property
    def prediction(self) -> Prediction:
        """Return the whole prediction, with breakdown, timeline and bottleneck."""
        return self.ask(self.plan)


@dataclass(frozen=True)
class Refused:
    """A plan, or all plans with some split, that cannot be used, and why."""

    plan: str
    reason: str
    count: int = 1


@dataclass(frozen=True)
class Counts:
    """How many plans there were, and what became of them."""

    enumerated: int = 0
    refused: int = 0
    pruned: int = 0
    simulated: int = 0


@dataclass(frozen=True)
class Ranking:
    """Plans best first; iterate, index, or print it as a table.

    Args:
        entries: best first by the objective.
        front: the plans that no other simulated plan equals or beats in time, memory and ranks together.
        refused: with reasons.
        counts: enumerated = refused + pruned + simulated.
        objective: what "best" means.
        machine: its name.
        ranks: how many there were.
        front_is_complete: whether the front is that of all plans that fit, as if every one were simulated.
        memory_bytes: the limit per rank where all ranks are used.
    """

    entries: tuple[Entry, ...]
    front: tuple[Entry, ...]
    refused: tuple[Refused, ...]
    counts: Counts
    objective: str = "time"
    machine: str = ""
    ranks: int = 0
    memory_bytes: float = 0.0
    front_is_complete: bool = False

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    def simulated(self) -> Ranking:
        """Return the plans by what a simulation of every event says of them; those that fit after all."""
        found = [
            dataclasses.replace(
                e, step_seconds=e.prediction.step_seconds, peak_bytes=e.prediction.peak_bytes, words=""
            )
            for e in self.entries
        ]
        good = [e for e in found if e.peak_bytes <= e.memory_bytes]
        ordered = sorted(good, key=lambda e: (e.score(self.objective), e.ranks))
        return dataclasses.replace(self, entries=tuple(ordered), front=front_of(good))

    @property
    def best(self) -> Entry:
        """Return the best plan."""
        if not self.entries:
            raise no_plan(self)
        return self.entries[0]

    def __str__(self) -> str:
        rows = [("", "plan", "ranks", "step", "samples/s", "memory")]
        for i, e in enumerate(self.entries, 1):
            rows.append(
                (
                    str(i),
                    str(e.plan),
                    str(e.ranks),
                    seconds_text(e.step_seconds),
                    f"{e.samples_per_second:.4g}",
                    f"{e.peak_bytes / 1e9:.3g} GB",
                )
            )
        lines = _table(rows)
        c = self.counts
        lines.append(
            f"{c.enumerated} plans: {c.refused} refused, {c.pruned} cannot be better, "
            f"{c.simulated} simulated."
        )
        if len(self.front) > 1:
            whose = "all plans that fit" if self.front_is_complete else "those simulated"
            lines.append(f"Of {whose}, none beats these in time, memory and ranks:")
            lines += _table(
                [
                    (
                        "  ",
                        str(e.plan),
                        f"{e.ranks} ranks" if e.ranks > 1 else "1 rank",
                        seconds_text(e.step_seconds),
                        f"{e.peak_bytes / 1e9:.3g} GB",
                    )
                    for e in self.front
                ]
            )
        return "\n".join(lines)


class NoPlanError(ValueError):
    """Say that no plan can be used, which one comes nearest, and what would help.

    Args:
        text: all that.
        ranking: without entries, with all that was refused.
    """

    def __init__(self, text: str, ranking: Ranking | None = None) -> None:
        super().__init__(text)
        # A ranking without entries counts as false.
        self.ranking = Ranking((), (), (), Counts()) if ranking is None else ranking


def no_plan(ranking: Ranking, why: str = "") -> NoPlanError:
    """Return the error for a ranking without entries; `why` is the plan that comes nearest, or nothing."""
    reasons = "; ".join(dict.fromkeys(r.reason for r in ranking.refused[:3]))
    said = why or reasons or "there is none"
    return NoPlanError(f"no plan for {ranking.ranks} ranks of {ranking.machine} can be used: {said}", ranking)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return one line for each row, its cells below each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def front_of(found: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the plans that no other one equals or beats in time, memory and ranks together."""
    front: list[Entry] = []
    for entry in sorted(found, key=lambda e: (e.step_seconds, e.peak_bytes, e.ranks)):
        if not any(other.peak_bytes <= entry.peak_bytes and other.ranks <= entry.ranks for other in front):
            front.append(entry)
    return tuple(front)
