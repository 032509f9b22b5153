"""The result file of the whole product: which case passed with which commit, so that a run can be resumed."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("result.json")


@cache
def commit() -> str:
    """Return the commit of the package's sources; `+` if they were changed since."""
    root = FILE.parents[2]

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "src").strip()
    return git("log", "-1", "--format=%h", "--", "src").strip() + ("+" if changed else "")


def load() -> dict[str, Any]:
    """Read what is known."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"cases": {}}


def save(results: dict[str, Any]) -> None:
    """Write what is known, with totals first."""
    cases = results["cases"]
    passed = sum(entry["passed"] for entry in cases.values())
    commits = sorted({entry["commit"] for entry in cases.values()})
    summary = {"passed": passed, "failed": len(cases) - passed, "commits": commits}
    text = json.dumps({"summary": summary, "cases": dict(sorted(cases.items()))}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")


def record(name: str, case: Callable[[], None]) -> None:
    """Run a case unless it passed with these sources before, and note how it went."""
    known = load()["cases"].get(name)
    if known is not None and known["passed"] and known["commit"] == commit():
        return
    start, passed = time.perf_counter(), False
    try:
        case()
        passed = True
    finally:
        results = load()
        seconds = round(time.perf_counter() - start, 1)
        results["cases"][name] = {"passed": passed, "seconds": seconds, "commit": commit()}
        save(results)
