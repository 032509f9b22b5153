"""How long a prediction takes: `python benchmarks/oracle/predictions.py [--write]`.

ResNet-50 at 224 pixels, 4 samples a rank, on a preset. The first call of a plan cuts, lowers and prices
its stages; later calls of the same plan, network and machine find that done, and simulate. Every plan gets an
oracle of its own, but the network stays known for shapes of micro-batches that it was followed for before. A
first call that takes longer than `PATIENCE` seconds is given up.
"""

from __future__ import annotations

import signal
import statistics
import sys
import time
from pathlib import Path

import shardwise as sw
from shardwise.commands.subject import build_model, training_graph
from shardwise.graph import Graph
from shardwise.plan import PlanError

MACHINE, PIXELS, SAMPLES = "lassen", 224, 4
RANKS = (2, 4, 8, 64, 512)
LATER = 5
PATIENCE = 20
_GRIDS = {2: "2x1", 4: "2x2", 8: "4x2", 64: "8x8", 512: "32x16"}


def plans(ranks: int) -> dict[str, str]:
    """Return one plan of every strategy for so many ranks."""
    two = ranks // 2
    found = {
        "data": f"data={ranks}",
        "spatial": f"spatial={_GRIDS[ranks]}",
        "filter": f"filter={ranks}",
        "channel": f"channel={ranks}",
        "layer": f"stages={ranks} schedule=layer",
        "gpipe": f"stages={ranks} schedule=gpipe micro_batches={min(2 * ranks, 64)}",
        "1f1b": f"stages={ranks} schedule=1f1b micro_batches={min(2 * ranks, 64)}",
        "gems-mast": f"stages={ranks} schedule=gems-mast",
        "gems-master": f"stages={ranks} schedule=gems-master replication=2",
    }
    if ranks >= 8:
        # Tiles x stages x micro-batches x two directions x replicas.
        found["five dimensions"] = (
            f"data={two // 2} stages=2 spatial=2x1 schedule=bidirectional micro_batches=4"
        )
    return found


class _LateError(Exception):
    """The first call took too long."""


def _give_up(*_: object) -> None:
    raise _LateError


def measure(graph: Graph, plan: str, batch: int) -> tuple[float, float]:
    """Return the seconds of the first prediction of a plan and the median of the later ones."""
    mine, machine = graph.with_batch(batch), sw.Machine.load(MACHINE)
    seconds = []
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(PATIENCE)
    for _ in range(1 + LATER):
        begin = time.perf_counter()
        sw.predict(mine, plan, machine, batch)
        seconds.append(time.perf_counter() - begin)
        signal.alarm(0)
    return seconds[0], statistics.median(seconds[1:])


def table() -> str:
    """Return all plans as Markdown, in milliseconds: first call / later calls."""
    graph = training_graph(build_model("resnet50"), (3, PIXELS, PIXELS), SAMPLES)
    sw.predict(graph, "data=1", MACHINE)  # modules are imported when they are first asked for
    rows: dict[str, list[str]] = {}
    for ranks in RANKS:
        for name, plan in plans(ranks).items():
            row = rows.setdefault(name, ["-"] * len(RANKS))
            try:
                first, later = measure(graph, plan, SAMPLES * ranks)
            except PlanError:
                row[RANKS.index(ranks)] = "refused"
                continue
            except _LateError:
                row[RANKS.index(ranks)] = f"> {PATIENCE} s"
                continue
            finally:
                signal.alarm(0)
            row[RANKS.index(ranks)] = f"{1e3 * first:.0f} / {1e3 * later:.1f}"
            print(f"{ranks:4} {name:16} {row[RANKS.index(ranks)]}", file=sys.stderr)
    head = ["strategy", *(f"{ranks} ranks" for ranks in RANKS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join([name, *cells]) + " |" for name, cells in rows.items())])


def main() -> None:
    """Measure all plans, print them, and keep them with `--write`."""
    text = (
        f"Milliseconds of `sw.predict` for ResNet-50 at {PIXELS} pixels, {SAMPLES} samples a rank, preset "
        f"`{MACHINE}`, on one core: first call / median of {LATER} later ones.\n\n{table()}\n"
    )
    print(text)
    if "--write" in sys.argv:
        Path(__file__).with_name("predictions.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
