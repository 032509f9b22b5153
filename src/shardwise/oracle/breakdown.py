"""Add up where the time of every rank goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.oracle.events import BUBBLE, Span

CATEGORIES = (
    *("forward", "backward", "halo", "statistics", "stage transfer"),
    *("reduction", BUBBLE, "update", "input"),
)


def breakdowns(spans: Iterable[Span], ranks: Sequence[int], step: float) -> tuple[dict[str, float], ...]:
    """Return the seconds of every rank by category, all of them; what is left of the step is bubble."""
    result: dict[int, dict[str, float]] = {rank: dict.fromkeys(CATEGORIES, 0.0) for rank in ranks}
    for span in spans:
        mine = result[span.rank]
        mine[span.category] = mine.get(span.category, 0.0) + span.end - span.start
    for mine in result.values():
        rest = step - sum(mine.values())
        if rest > 1e-12:
            mine[BUBBLE] = mine.get(BUBBLE, 0.0) + rest
    return tuple(result[rank] for rank in ranks)
