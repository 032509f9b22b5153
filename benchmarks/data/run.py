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
    heading = [
        "# Data: results",
        conditions(f"python benchmarks/data/run.py --repeats {options.repeats}"),
    ]
    lines = [
        "| model | transport | ours | DDP | DDP, bucket views | best DDP over ours | ours without overlap "
        "| exposed with overlap | exposed without |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model in options.models:
        for transport in options.transports:
            found = launch(HERE / "measure.py", 2, transport, model, options.repeats, options.pixels)
            best = min(found["ddp"], found["ddp views"])
            ours, late, ddp, views = (found[kind] for kind in ("ours", "ours late", "ddp", "ddp views"))
            exposed = f"{found['exposed']:.3f} | {found['exposed late']:.3f}"
            lines.append(
                f"| {model} | {transport} | {ours:.3f} | {ddp:.3f} | {views:.3f} "
                f"| {best / ours:.2f}x | {late:.3f} | {exposed} |"
            )
            print(lines[-1], flush=True)
    single = ["| model | `fit` | loop by hand | `fit` over loop |", "|---|---:|---:|---:|"]
    for model in options.alone:
        seconds = alone(model, options.repeats)
        mine, hand = seconds["fit"], seconds["by hand"]
        single.append(f"| {model} | {mine:.4f} | {hand:.4f} | {mine / hand:.3f}x |")
        print(single[-1], flush=True)
    text = (
        "\n\n".join(heading) + "\n\n" + "\n".join(lines) + "\n\n## One process\n\n" + "\n".join(single) + "\n"
    )
    options.output.write_text(text)


if __name__ == "__main__":
    main()
