"""Compare the peak of a rank's memory with one device's: `python benchmarks/memory/run.py`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from turns import launch  # noqa: E402  (found beside this folder)

from shardwise.plan import Plan  # noqa: E402

CASES = ("resnet50:1024:1", "unet:1024:1")
PLANS = ("spatial=2x2", "spatial=4x1")
BAR = 0.30


def fullest(ranks: list[dict[str, int]]) -> dict[str, int]:
    """Return each figure of the rank that needs most of it."""
    sums = [
        {
            "saved": rank["saved"] + rank["buffers"] + rank["data"],
            "whole": rank["whole"] + rank["buffers"] + rank["data"],
            "resident": rank["resident"],
            "buffers": rank["buffers"],
        }
        for rank in ranks
    ]
    return {key: max(found[key] for found in sums) for key in sums[0]}


def row(case: str, plan: str, found: dict[str, int], base: dict[str, int]) -> str:
    """Write one line of the table: MiB, then the parts of one device."""
    cells = [f"{value / 2**20:.0f}" for value in found.values()]
    cells += [f"{found[key] / base[key]:.3f}" for key in ("saved", "whole", "resident")]
    return f"| {case} | `{plan}` | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=CASES, help="model:pixels:batch")
    parser.add_argument("--plans", nargs="*", default=PLANS)
    parser.add_argument("--transport", default="mpi4py")
    parser.add_argument("--output", type=Path, default=HERE / "result.md")
    options = parser.parse_args()
    lines = [
        "# Memory: results",
        f"`python benchmarks/memory/run.py` on {len(os.sched_getaffinity(0))} cores, {options.transport}. "
        "MiB on the fullest rank, and as a part of one device. "
        f"The bar: saved tensors and buffers at most {BAR:.2f} of one device.",
        "| case | plan | saved and buffers | whole step | resident | of it communication buffers "
        "| saved: part | whole step: part | resident: part |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in options.cases:
        base: dict[str, int] = {}
        for plan in ("none", *options.plans):
            ranks = 1 if plan == "none" else Plan.parse(plan).ranks
            found = fullest(launch(HERE / "measure.py", ranks, options.transport, case, plan)["ranks"])
            base = base or found
            lines.append(row(case, plan, found, base))
            print(lines[-1], flush=True)
    options.output.write_text("\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]) + "\n")


if __name__ == "__main__":
    main()
