"""Turn measured rows into markdown tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """Hold one claim: what was found, what is asked for, and whether it holds."""

    name: str
    found: str
    asked: str
    passed: bool


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a markdown table."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def size_text(count: int) -> str:
    """Return bytes as people write them."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale and count % scale == 0:
            return f"{count // scale} {unit}"
    return f"{count // 1_000_000} MB" if count >= 1_000_000 else f"{count} B"


def bars_table(bars: list[Bar]) -> str:
    """Return the bars with pass or miss."""
    rows = [[bar.name, bar.found, bar.asked, "pass" if bar.passed else "miss"] for bar in bars]
    return table(["bar", "measured", "asked", "verdict"], rows)


def pairs_table(rows: list[dict[str, Any]]) -> str:
    """Return latency and bandwidth by message size."""
    kinds = ("raw", "ours", "gloo")
    head = ["message", *(f"{kind} us" for kind in kinds), *(f"{kind} GB/s" for kind in kinds)]
    lines = [
        [
            size_text(row["bytes"]),
            *(f"{row[kind] * 1e6:.1f}" for kind in kinds),
            *(f"{row['bytes'] / row[kind] / 1e9:.2f}" for kind in kinds),
        ]
        for row in rows
    ]
    return table(head, lines)


def allreduce_table(rows: list[dict[str, Any]]) -> str:
    """Return the all-reduce times and their ratios to raw mpi4py."""
    lines = [
        [
            size_text(row["bytes"]),
            *(f"{row[kind] * 1e3:.3f}" for kind in ("raw", "ours", "gloo")),
            f"{row['ours'] / row['raw']:.2f}x",
            f"{row['gloo'] / row['ours']:.2f}x",
        ]
        for row in rows
    ]
    return table(["tensor", "raw ms", "ours ms", "gloo ms", "ours/raw", "gloo/ours"], lines)


def overlap_table(rows: list[dict[str, Any]]) -> str:
    """Return how much of an exchange was hidden: 1 - exposed/alone."""
    lines = [
        [
            size_text(row["bytes"]),
            row["direction"],
            f"{row['alone'] * 1e3:.2f}",
            f"{row['exposed'] * 1e3:.2f}",
            f"{1 - row['exposed'] / row['alone']:.0%}",
        ]
        for row in rows
    ]
    return table(["message", "direction", "alone ms", "exposed ms", "overlap"], lines)


def chain_table(rows: list[dict[str, Any]]) -> str:
    """Return microseconds per hop by number of ranks."""
    lines = [[str(row["ranks"]), f"{row['raw'] * 1e6:.1f}", f"{row['ours'] * 1e6:.1f}"] for row in rows]
    return table(["ranks", "raw us/hop", "ours us/hop"], lines)


def patterns_table(rows: list[dict[str, Any]]) -> str:
    """Return regular regrids by messages and by the collective that does the same."""
    lines = [
        [
            row["pattern"],
            row["transport"],
            str(row["ranks"]),
            size_text(row["bytes"]),
            f"{row['messages'] * 1e3:.3f}",
            f"{row['collective'] * 1e3:.3f}",
            f"{row['collective'] / row['messages']:.2f}x",
        ]
        for row in rows
    ]
    head = ["pattern", "transport", "ranks", "tensor", "messages ms", "collective ms", "collective/messages"]
    return table(head, lines)


def buckets_table(rows: list[dict[str, Any]]) -> str:
    """Return a step of DistributedDataParallel by how its buckets are waited for."""
    kinds = ("no messages", "at once", "background")
    lines = [[row["transport"], *(f"{row[kind] * 1e3:.1f}" for kind in kinds)] for row in rows]
    return table(["transport", *(f"{kind} ms" for kind in kinds)], lines)


def halo_table(rows: list[dict[str, Any]]) -> str:
    """Return the halo exchanges and their ratio."""
    lines = [
        [
            str(row["rows"]),
            f"{row['by hand'] * 1e3:.2f}",
            f"{row['regrid'] * 1e3:.2f}",
            f"{row['regrid'] / row['by hand']:.2f}x",
        ]
        for row in rows
    ]
    return table(["rows of halo", "by hand ms", "regrid ms", "ratio"], lines)
