"""Compare stock `model.fit` with `fit` under plans: `python benchmarks/keras/run.py`.

Each case is kept in result.json; result.md is the table of all. `--models resnet50@64` measures one alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KEPT, TABLE = HERE / "result.json", HERE / "result.md"
CASES = {
    "data=1": 1,
    "data=2": 2,
    "data=2 batch_norm=local": 2,
    "stages=2 micro_batches=4": 2,
}
# Model and image size, with the mini-batch and the steps of one epoch.
WORK = {"resnet50@224": (8, 3), "resnet50@64": (16, 6), "resnet110v2@32": (16, 6)}
BARS = {"resnet50": {1: 1.0, 2: 1.7}, "resnet110v2": {1: 1.2, 2: 1.7}}
QUIET = 0.9
"""What part of the time the one thread of a process must have had a core for a measurement to count."""


def launch(model: str, plan: str, batch: int, steps: int) -> dict[str, Any]:
    """Run one case on its ranks and return its row."""
    ranks = CASES[plan]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "row.json"
        script = [str(HERE / "measure.py"), model, plan, str(batch), str(steps), str(target)]
        command = [sys.executable, "-m", "shardwise.cli", "run", "-n", str(ranks), *script]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        row: dict[str, Any] = json.loads(target.read_text())
        return {**row, "batch": batch, "steps": steps}


def line(row: dict[str, Any], stock: dict[str, Any]) -> str:
    """Return one line of the table; `stock` is the row in which stock `fit` was measured."""
    ratio, bar = row["plan_rate"] / stock["stock_rate"], BARS[row["model"].split("@")[0]][row["ranks"]]
    verdict = f">= {bar:.1f}x {'met' if ratio >= bar else 'missed'}"
    busy = min(stock["stock_busy"], row["plan_busy"] if row["ranks"] == 1 else 1.0)
    rates = f"{row['plan_rate']:.2f} | {stock['stock_rate']:.2f}"
    head = f"| {row['model']} | {row['plan']} | {row['ranks']} | {row['batch']} x {row['steps']} |"
    return f"{head} {rates} | {busy:.2f} | {ratio:.2f}x | {verdict}{'' if busy >= QUIET else ', disturbed'} |"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return everything measured as a table."""
    lines = [
        "# Training throughput of `model.fit`, stock and through shardwise",
        "",
        "`python benchmarks/keras/run.py`: one thread per rank, SGD, accuracy as metric; samples per second",
        "of whole calls of `fit` after a first one, the better of two; stock and one process take turns.",
        "The size of the images stands behind the model. `busy` is the part of the time that single",
        "processes had a core: below 0.9 other programs disturbed, and the case should be repeated.",
        "",
        "| model | plan | ranks | batch x steps | samples/s | stock fit | busy | ratio | bar |",
        "|---|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for row in rows.values():
        stock = rows.get(f"{row['model']} data=1")
        if stock is not None:
            lines.append(line(row, stock))
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(WORK))
    parser.add_argument("--plans", nargs="*", default=list(CASES))
    options = parser.parse_args()
    for model in options.models:
        for plan in options.plans:
            row = launch(model, plan, *WORK[model])
            rows = json.loads(KEPT.read_text()) if KEPT.exists() else {}
            rows[f"{model} {plan}"] = row
            KEPT.write_text(json.dumps(rows, indent=1) + "\n")
            TABLE.write_text(table(rows))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
