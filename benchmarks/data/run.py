"""Compare data parallelism with DistributedDataParallel: `python benchmarks/data/run.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from turns import conditions, launch  # noqa: E402  (found beside this folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=("resnet50", "vgg16"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--transports", nargs="*", default=("mpi4py", "gloo"))
    parser.add_argument("--output", type=Path, default=HERE / "result.md")
    options = parser.parse_args()
    lines = [
        "# Data: results",
        conditions(f"python benchmarks/data/run.py --repeats {options.repeats}"),
        "| model | transport | ours | DDP | DDP, bucket views | best DDP over ours | ours without overlap |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for model in options.models:
        for transport in options.transports:
            found = launch(HERE / "measure.py", 2, transport, model, options.repeats, options.pixels)
            best = min(found["ddp"], found["ddp views"])
            ours, late, ddp, views = (found[kind] for kind in ("ours", "ours late", "ddp", "ddp views"))
            lines.append(
                f"| {model} | {transport} | {ours:.3f} | {ddp:.3f} | {views:.3f} "
                f"| {best / ours:.2f}x | {late:.3f} |"
            )
            print(lines[-1], flush=True)
    options.output.write_text("\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]) + "\n")


if __name__ == "__main__":
    main()
