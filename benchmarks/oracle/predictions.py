"""How long a prediction takes: `python benchmarks/oracle/predictions.py [--write]`.

ResNet-50 at 224 pixels, 4 samples a rank, on a preset, each plan with a network captured for it alone and an
oracle of its own. What belongs to the network and to no plan is prepared once: what makes it for other
numbers of samples (`Graph.batches`), for which it is followed for two of them, and timed by itself. Then
three calls of `sw.predict` are timed:

    first   a plan of which nothing is known: stages are cut, lowered and priced, for the sizes of its
            micro-batches, and the step is simulated
    other   after that, the same split with another schedule, or with another number of micro-batches: what
            does not depend on these is known. A star marks those whose stages had to be lowered again,
            because micro-batches of another size have stages of their own
    again   the very same plan once more: the simulated step is remembered, only the answer is put together

`first` is what a bar for one prediction has to be held against. A call that takes longer than `PATIENCE`
seconds is given up.
"""

from __future__ import annotations

import gc
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import shardwise as sw
from shardwise.commands.subject import build_model, training_graph
from shardwise.graph import Graph
from shardwise.oracle.predict import oracle_of
from shardwise.plan import PlanError

MACHINE, PIXELS, SAMPLES = "lassen", 224, 4
RANKS = (2, 4, 8, 64, 512)
AGAIN = 5
PATIENCE = 20
BAR_SECONDS = 0.05
FEW_RANKS = 8
_GRIDS = {2: "2x1", 4: "2x2", 8: "4x2", 64: "8x8", 512: "32x16"}


def plans(ranks: int) -> dict[str, tuple[str, str]]:
    """Return one plan of every strategy for so many ranks, and another that splits the network alike."""
    parts = f"micro_batches={min(2 * ranks, 64)}"
    alike = {
        name: (text, f"{text} micro_batches=2")
        for name, text in (
            ("data", f"data={ranks}"),
            ("spatial", f"spatial={_GRIDS[ranks]}"),
            ("filter", f"filter={ranks}"),
            ("channel", f"channel={ranks}"),
        )
    }
    piped = {
        "layer": ("layer", "gpipe micro_batches=2"),
        "gpipe": (f"gpipe {parts}", f"1f1b {parts}"),
        "1f1b": (f"1f1b {parts}", f"gpipe {parts}"),
        "gems-mast": ("gems-mast", "gems-master replication=2"),
        "gems-master": ("gems-master replication=2", "gems-mast"),
    }
    found = alike | {
        name: (f"stages={ranks} schedule={first}", f"stages={ranks} schedule={other}")
        for name, (first, other) in piped.items()
    }
    if ranks >= 8:
        # Tiles x stages x micro-batches x two directions x replicas.
        five = f"data={ranks // 4} stages=2 spatial=2x1 schedule=bidirectional"
        found["five dimensions"] = (f"{five} micro_batches=4", f"{five} micro_batches=2")
    return found


@dataclass(frozen=True)
class Times:
    """Seconds of the three calls, and of what is prepared once for the network.

    `lowered` tells whether `other` had to lower stages again.
    """

    ranks: int
    prepared: float
    first: float
    other: float | None
    again: float
    lowered: bool

    def __str__(self) -> str:
        other = "-" if self.other is None else f"{1e3 * self.other:.0f}{'*' if self.lowered else ''}"
        return f"{1e3 * self.first:.0f} / {other} / {1e3 * self.again:.1f}"


class _LateError(Exception):
    """A call took too long."""


def _give_up(*_: object) -> None:
    raise _LateError


@contextmanager
def _patience() -> Iterator[None]:
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)


def measure(graph: Graph, plan: str, other: str) -> Times:
    """Time the three calls for a network that was captured for this plan alone."""
    machine = sw.Machine.load(MACHINE)
    stages = oracle_of(graph, machine)._programs
    begin = time.perf_counter()
    assert graph.batches is not None
    prepared = time.perf_counter() - begin

    def seconds(text: str) -> float:
        # What earlier plans left behind is not to be tidied up in the time of this one.
        gc.collect()
        begin = time.perf_counter()
        with _patience():
            sw.predict(graph, text, machine)
        return time.perf_counter() - begin

    first = seconds(plan)
    known = len(stages)
    found: float | None = None
    with suppress(PlanError):  # such a plan cannot be used here
        found = seconds(other)
    lowered = len(stages) > known
    return Times(
        graph.batch // SAMPLES,
        prepared,
        first,
        found,
        statistics.median(seconds(plan) for _ in range(AGAIN)),
        lowered,
    )


def network(samples: int) -> Graph:
    """Return the network for a mini-batch, of which nothing else is known."""
    return training_graph(build_model("resnet50"), (3, PIXELS, PIXELS), samples)


def cell(plan: str, other: str, ranks: int, found: list[Times]) -> str:
    """Measure one plan; add what was found, and return it as words."""
    try:
        times = measure(network(SAMPLES * ranks), plan, other)
    except PlanError:
        return "refused"
    except _LateError:
        return f"> {PATIENCE} s"
    found.append(times)
    return str(times)


def table() -> str:
    """Return all plans as Markdown, and how many of them stay under the bar."""
    sw.predict(network(1), "data=1", MACHINE)  # modules are imported when they are first asked for
    rows: dict[str, list[str]] = {}
    found: list[Times] = []
    late = 0
    for ranks in RANKS:
        for name, (plan, other) in plans(ranks).items():
            row = rows.setdefault(name, ["-"] * len(RANKS))
            words = row[RANKS.index(ranks)] = cell(plan, other, ranks, found)
            late += words.startswith(">")
            print(f"{ranks:4} {name:16} {words}", file=sys.stderr)
    head = ["strategy", *(f"{ranks} ranks" for ranks in RANKS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join([name, *cells]) + " |" for name, cells in rows.items()]
    return "\n".join([*lines, "", summary(found, late)])


def summary(found: list[Times], late: int) -> str:
    """Say how many predictions stay under the bar."""
    columns = {
        "first": [t.first for t in found] + [float("inf")] * late,
        "other with shared stages": [t.other for t in found if t.other is not None and not t.lowered],
        "other with stages lowered again": [t.other for t in found if t.other is not None and t.lowered],
        "again": [t.again for t in found],
    }
    few = [t.first for t in found if t.ranks <= FEW_RANKS]
    columns = {f"first, on 2 to {FEW_RANKS} ranks": few} | columns
    once = sorted(1e3 * t.prepared for t in found)
    lines = [
        f"Prepared once for each network, before its first plan: {statistics.median(once):.0f} ms "
        f"({once[0]:.0f} to {once[-1]:.0f} ms).",
        "",
        f"Within {1e3 * BAR_SECONDS:.0f} ms:",
        "",
    ]
    for name, times in columns.items():
        if times:
            within = sum(t <= BAR_SECONDS for t in times)
            lines.append(
                f"- {name}: {within} of {len(times)}, median {1e3 * statistics.median(times):.0f} ms, "
                f"longest {_longest(times)}"
            )
    return "\n".join(lines)


def _longest(times: list[float]) -> str:
    return f"{1e3 * max(times):.0f} ms" if max(times) < float("inf") else f"> {PATIENCE} s"


def main() -> None:
    """Measure all plans, print them, and keep them with `--write`."""
    text = (
        f"Milliseconds of `sw.predict` for ResNet-50 at {PIXELS} pixels, {SAMPLES} samples a rank, preset "
        f"`{MACHINE}`, on one core: first / other / again.\n\n"
        "First: a plan of which nothing is known, lowered, priced and simulated, of a network for which "
        "`Graph.batches` is prepared. Other: after it the same "
        "split with another schedule or number of micro-batches; a star where that lowers stages again. "
        f"Again: the very same plan, whose simulated step is remembered (median of {AGAIN}).\n\n{table()}\n"
    )
    print(text)
    if "--write" in sys.argv:
        Path(__file__).with_name("predictions.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
