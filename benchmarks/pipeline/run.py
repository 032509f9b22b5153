"""Compare pipelines with torch's, and GEMS with its bound: `python benchmarks/pipeline/run.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from turns import conditions, launch  # noqa: E402  (found beside this folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=("chain", "resnet110v2"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--transports", nargs="*", default=("mpi4py", "gloo"))
    parser.add_argument("--output", type=Path, default=HERE / "result.md")
    options = parser.parse_args()
    lines = [
        "# Pipeline: results",
        conditions(f"python benchmarks/pipeline/run.py --repeats {options.repeats}"),
        "| model | transport | schedule | ours | torch | torch over ours |",
        "|---|---|---|---:|---:|---:|",
    ]
    for model in options.models:
        for transport in options.transports:
            found = launch(HERE / "measure.py", 2, transport, model, options.repeats)
            for schedule in ("gpipe", "1f1b", "zero-bubble"):
                ours, torch = found[schedule], found.get(f"torch {schedule}")
                peer = f"{torch:.3f} | {torch / ours:.2f}x" if torch else "- | -"
                lines.append(f"| {model} | {transport} | {schedule} | {ours:.3f} | {peer} |")
                print(lines[-1], flush=True)
    gems = ["| ranks | schedule | rounds | step | bound | step over bound |", "|---|---|---:|---:|---:|---:|"]
    for ranks in (2, 4):
        found = launch(HERE / "gems.py", ranks, options.transports[0], options.repeats)
        for row in found["rows"]:
            gems.append(
                f"| {ranks} | {row['schedule']} | {row['rounds']} | {row['step']:.3f} | {row['bound']:.3f} "
                f"| {row['step'] / row['bound']:.2f}x |"
            )
            print(gems[-1], flush=True)
    text = "\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]) + "\n\n## GEMS\n\n" + "\n".join(gems) + "\n"
    options.output.write_text(text)


if __name__ == "__main__":
    main()
