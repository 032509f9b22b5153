"""How long a search takes and how much memory it needs: `python benchmarks/oracle/search.py [--write]`.

Each case runs in a process of its own, so that its peak of resident memory is its own; capture is not timed,
because a network is captured once and searched as often as one likes.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Network, size of its images, samples of the mini-batch, ranks.
CASES = (
    ("resnet1001v2", 224, 2048, 2048),
    ("resnet1001v2", 32, 2048, 2048),
    ("resnet50", 224, 2048, 2048),
    ("resnet50", 224, 256, 64),
)
MACHINE = "lassen"
_COLUMNS = ("network", "pixels", "batch", "ranks", "seconds", "of CPU", "peak GB", "of it before GB")
_COUNTS = ("enumerated", "refused", "pruned", "simulated")


def measure(name: str, pixels: int, batch: int, ranks: int) -> dict[str, Any]:
    """Search once, in this process."""
    from shardwise.commands.subject import build_model, training_graph
    from shardwise.machine import Machine
    from shardwise.oracle.search import search

    graph = training_graph(build_model(name), (3, pixels, pixels), batch)
    machine = Machine.load(MACHINE)
    before = _peak()
    begin, worked = time.perf_counter(), time.process_time()
    ranking = search(graph, machine, ranks, batch)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - worked
    counts = ranking.counts
    return {
        "case": [name, pixels, batch, ranks],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_gigabytes": _peak(),
        "before_gigabytes": before,
        "counts": [counts.enumerated, counts.refused, counts.pruned, counts.simulated],
        "best": str(ranking.best.plan),
        "step_seconds": ranking.best.step_seconds,
    }


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def alone(*case: object) -> dict[str, Any]:
    """Search in a process of its own."""
    words = [sys.executable, __file__, "--one", json.dumps(case)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the search of {case} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    head = (*_COLUMNS, *_COUNTS)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [*row["case"], f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}"]
        cells.append(f"{row['peak_gigabytes']:.2f}")
        cells += [f"{row['before_gigabytes']:.2f}", *row["counts"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    best = [f"- {' '.join(map(str, r['case']))}: `{r['best']}`, {r['step_seconds']:.3g} s" for r in rows]
    return "\n".join([*lines, "", "Best plans found:", "", *best])


def main() -> None:
    """Measure all cases, print them, and keep them with `--write`."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
        return
    text = f"On the preset `{MACHINE}`, on one core.\n\n{table([alone(*case) for case in CASES])}\n"
    print(text)
    if "--write" in sys.argv:
        Path(__file__).with_name("search.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
