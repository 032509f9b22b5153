"""Compare tiles on two ranks with one process: `python benchmarks/spatial/run.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from turns import conditions, launch  # noqa: E402  (found beside this folder)

CASES = (
    "resnet50:512:1",
    "resnet50:512:2",
    "resnet50:1024:1",
    "unet:512:1",
    "unet:1024:1",
    "unet-nobn:512:1",
)
PLANS = ("spatial=2x1", "spatial=2x1 halo=fused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=CASES, help="model:pixels:batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--transports", nargs="*", default=("mpi4py", "gloo"))
    parser.add_argument("--output", type=Path, default=HERE / "result.md")
    options = parser.parse_args()
    lines = [
        "# Spatial: results",
        conditions(f"python benchmarks/spatial/run.py --repeats {options.repeats}"),
        "| case | transport | plan | ours | one thread | two threads | bound | over one thread "
        "| over two threads | bound over one thread |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in options.cases:
        for transport in options.transports:
            found = launch(HERE / "measure.py", 2, transport, case, options.repeats, ",".join(PLANS))
            one, two, bound = found["one"], found["two"], found["bound"]
            for plan in PLANS:
                ours = found[plan]
                lines.append(
                    f"| {case} | {transport} | `{plan}` | {ours:.3f} | {one:.3f} | {two:.3f} | {bound:.3f} "
                    f"| {one / ours:.2f}x | {two / ours:.2f}x | {one / bound:.2f}x |"
                )
                print(lines[-1], flush=True)
    options.output.write_text("\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]) + "\n")


if __name__ == "__main__":
    main()
