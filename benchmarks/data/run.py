"""Compare data parallelism with DistributedDataParallel: `python benchmarks/data/run.py`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from turns import conditions, launch  # noqa: E402  (found beside this folder)


def alone(model: str, repeats: int) -> dict[str, float]:
    """Return the seconds per step of `fit` and of a loop by hand in one process."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        words = [sys.executable, str(HERE / "alone.py"), model, str(repeats), str(target)]
        subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        found: dict[str, float] = json.loads(target.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=("resnet50", "vgg16"))
    parser.add_argument(
        "--alone", nargs="*", default=("resnet110v2",), help="models for `fit` on one process"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--transports", nargs="*", default=("mpi4py", "gloo"))
    parser.add_argument("--output", type=Path, default=HERE / "result.md")
    options = parser.parse_args()
    lines = [
        "# Data: results",
        "",
        conditions(f"python benchmarks/data/run.py --repeats {options.repeats}"),
        "",
        "| model | transport | DDP | its seconds | ours | DDP over ours | with overlap | without "
        "| exposed with overlap | exposed without |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]

    def add(line: str) -> None:
        """Write what is known so far: a long run that ends early has its rows."""
        lines.append(line)
        print(line, flush=True)
        options.output.write_text("\n".join(lines) + "\n")

    for model in options.models:
        for transport in options.transports:
            for views, kind in enumerate(("defaults", "bucket views")):
                found = launch(
                    HERE / "measure.py", 2, transport, model, options.repeats, options.pixels, views
                )
                ours, ddp = found["ours"], found["ddp"]
                overlap = " | ".join(
                    f"{found[name]:.3f}" for name in ("early", "late", "exposed early", "exposed late")
                )
                add(
                    f"| {model} | {transport} | {kind} | {ddp:.3f} | {ours:.3f} "
                    f"| {ddp / ours:.3f}x | {overlap} |"
                )
    if options.alone:
        lines += ["", "## One process", "", "| model | `fit` | loop by hand | `fit` over loop |"]
        lines.append("|---|---:|---:|---:|")
    for model in options.alone:
        seconds = alone(model, options.repeats)
        mine, hand = seconds["fit"], seconds["by hand"]
        add(f"| {model} | {mine:.4f} | {hand:.4f} | {mine / hand:.3f}x |")


if __name__ == "__main__":
    main()
