"""The result of the whole product: which case passed with which commit, so that a run can be resumed.

`result.jsonl` has one line per case and grows while the product runs; `result.md` is what a reader wants to
know of it. Lines of other commits are dropped when the first case of a new one is recorded.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from transparency.compare import ZERO_GRADIENT, ZERO_STATISTIC

FILE = Path(__file__).with_name("result.jsonl")
# What a case runs: a change elsewhere, in the oracle or for Keras, leaves its result as it was.
SOURCES = (
    *(f"src/shardwise/{name}" for name in ("geometry", "graph", "plan", "program", "training", "zoo")),
    "src/shardwise/runtime",
    ":!src/shardwise/graph/keras",
    ":!src/shardwise/runtime/calibrate",
    # Cases have a launcher of their own.
    ":!src/shardwise/runtime/launch.py",
    ":!src/shardwise/training/auto.py",
    # On which networks belongs to it too.
    *(f"tests/transparency/{name}.py" for name in ("cases", "harness", "models", "random_cnn")),
)
ZEROS = (ZERO_GRADIENT, ZERO_STATISTIC)
QUANTITIES = ("loss", "input gradient", "weight gradient", "statistics", "weights")


@cache
def commit() -> str:
    """Return the last commit that changed what a case runs; `+` if that was changed since."""
    root = FILE.parents[2]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", *SOURCES).strip()
    return git("log", "-1", "--format=%h", "--", *SOURCES).strip() + ("+" if changed else "")


@cache
def known() -> dict[str, dict[str, Any]]:
    """Return what is known of these sources, the last word on each case; forget other sources."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    entries = [json.loads(line) for line in lines]
    mine = {entry["case"]: entry for entry in entries if entry["commit"] == commit()}
    if len(mine) < len(entries):
        FILE.write_text("".join(map(_line, mine.values())), encoding="utf-8")
    return mine


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, separators=(",", ":")) + "\n"


def record(name: str, transport: str, case: Callable[[], dict[str, float]]) -> None:
    """Run a case unless it passed with these sources before, and note how it went."""
    if known().get(name, {"passed": False})["passed"]:
        return
    entry: dict[str, Any] = {"case": name, "commit": commit(), "transport": transport, "passed": False}
    start = time.perf_counter()
    try:
        entry["worst"] = {kind: float(f"{error:.2g}") for kind, error in sorted(case().items())}
        entry["passed"] = True
    finally:
        entry["seconds"] = round(time.perf_counter() - start, 1)
        known()[name] = entry
        with FILE.open("a", encoding="utf-8") as file:
            file.write(_line(entry))


def summarise(names: Iterable[str]) -> str:
    """Write what a reader wants to know of the given cases beside the record, and return it."""
    wanted = list(names)
    entries = [known()[name] for name in wanted if name in known()]
    failed = [entry["case"] for entry in entries if not entry["passed"]]
    minutes = sum(entry["seconds"] for entry in entries) / 60
    lines = [
        "# Split equals unsplit: the whole product",
        "",
        f"Sources of commit `{commit()}`, float64, three steps of SGD with momentum on real ranks. Every",
        "case compares the losses, the gradients of the input and of every weight, and batch-norm statistics",
        "and weights after the last step with one device.",
        "",
        f"{len(entries)} of {len(wanted)} cases were run in {minutes:.0f} minutes: "
        f"{len(entries) - len(failed)} passed, {len(failed)} failed.",
        "",
        "| worst error, at most 1e-10 | " + " | ".join(QUANTITIES) + " | " + " | ".join(ZEROS) + " | cases |",
        "|---" * (len(QUANTITIES) + len(ZEROS) + 2) + "|",
    ]
    for transport in sorted({entry["transport"] for entry in entries}):
        mine = [e["worst"] for e in entries if e["transport"] == transport and e["passed"]]
        kinds = (*QUANTITIES, *ZEROS)
        cells = [f"{max((worst.get(kind, 0.0) for worst in mine), default=0.0):.1e}" for kind in kinds]
        lines.append(f"| {transport} | {' | '.join(cells)} | {len(mine)} |")
    lines += [
        "",
        "*Zero*: gradients that are zero in exact arithmetic, as of a bias in front of a batch norm, and",
        "such statistics hold nothing but rounding; above 1e-10 they are judged by how far one device is",
        "from itself (see `compare.py`).",
        "",
        *(f"- failed: {name}" for name in failed),
    ]
    text = "\n".join(lines).rstrip() + "\n"
    FILE.with_suffix(".md").write_text(text, encoding="utf-8")
    return text
