"""Write a timeline in the format that chrome://tracing and Perfetto read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwise.oracle.events import Span


def chrome_trace(timeline: Iterable[Span]) -> dict[str, Any]:
    """Return the spans of a step as trace events: one process per rank, microseconds."""
    events: list[dict[str, Any]] = []
    ranks: set[int] = set()
    for span in timeline:
        ranks.add(span.rank)
        events.append(
            {
                "name": span.label or span.category,
                "cat": span.category,
                "ph": "X",
                "ts": 1e6 * span.start,
                "dur": 1e6 * (span.end - span.start),
                "pid": span.rank,
                "tid": 0,
            }
        )
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted(ranks)
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def save_trace(timeline: Iterable[Span], path: str | Path) -> None:
    """Write a timeline to a file."""
    Path(path).write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
