"""Compare stock `model.fit` with `fit` under plans and write result.md: `python benchmarks/keras/run.py`."""

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
CASES = [
    ("data=1", 1),
    ("data=2", 2),
    ("data=2 batch_norm=local", 2),
    ("stages=2 micro_batches=4", 2),
]
BARS = {("resnet50", 1): 1.0, ("resnet110v2", 1): 1.2, ("resnet50", 2): 1.7, ("resnet110v2", 2): 1.7}


def launch(model: str, plan: str, ranks: int, batch: int, steps: int) -> dict[str, Any]:
    """Run one case on so many ranks and return its row."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "row.json"
        script = [str(HERE / "measure.py"), model, plan, str(batch), str(steps), str(target)]
        command = [sys.executable, "-m", "shardwise.cli", "run", "-n", str(ranks), *script]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        row: dict[str, Any] = json.loads(target.read_text())
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["resnet50", "resnet110v2"])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    lines = [
        "# Training throughput of `model.fit`, stock and through shardwise",
        "",
        f"`python benchmarks/keras/run.py --batch {options.batch} --steps {options.steps}`: SGD, accuracy as",
        "metric; samples per second of whole calls of `fit` after a first one, the better of two; stock and",
        "one process take turns. ResNet-50 at 64x64, ResNet-110-v2 at 32x32.",
        "",
        f"Batch {options.batch}, {options.steps} steps, one thread per rank, load before: {load:.1f}.",
        "",
        "| model | plan | ranks | samples/s | stock fit | ratio | bar |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for model in options.models:
        stock = 0.0
        for plan, ranks in CASES:
            row = launch(model, plan, ranks, options.batch, options.steps)
            stock = row.get("stock", stock)
            ratio, bar = row["plan"] / stock, BARS[model, ranks]
            verdict = f">= {bar:.1f}x {'met' if ratio >= bar else 'missed'}"
            lines.append(
                f"| {model} | {plan} | {ranks} | {row['plan']:.2f} | {stock:.2f} | {ratio:.2f}x | {verdict} |"
            )
            print(lines[-1], flush=True)
    if load > 1.0:
        lines[6] += "\n\n**Other programs kept the cores busy when this began; repeat on a quiet machine.**"
    (HERE / "result.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
