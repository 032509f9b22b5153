"""Compare tiles on two ranks with one process: `python benchmarks/spatial/run.py`.

Each case is measured on its own and kept in `result.json`, so a long run can be done in pieces; the table
`result.md` always shows all that was measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from turns import conditions, launch  # noqa: E402  (found beside this folder)

CASES = tuple(
    f"{model}:{size}"
    for size in ("512:1", "512:2", "1024:1", "1024:2")
    for model in ("resnet50", "unet", "unet-nobn")
)
BARS = {"resnet50": (1.8, 1.0), "unet": (1.8, 1.0), "unet-nobn": (1.9, 1.1)}


def main() -> None:
    """Measure the cases that were asked for, and write the table of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=CASES, help="model:pixels:batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--transports", nargs="*", default=("mpi4py", "gloo"))
    parser.add_argument("--default", action="store_true", help="the default plan only, with less memory")
    parser.add_argument("--brief", action="store_true", help="without one process with channels last")
    parser.add_argument("--missing", action="store_true", help="skip what result.json has already")
    parser.add_argument("--rows", type=Path, default=HERE / "result.json")
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(options.rows.read_text()) if options.rows.exists() else {}
    # Rows from before the bound that meets was timed have to be measured again.
    rows = {key: row for key, row in known.items() if "meeting" in row}
    header = conditions("python benchmarks/spatial/run.py --missing")
    for transport in options.transports:
        for case in options.cases:
            key = f"{case} {transport}"
            if options.missing and key in rows:
                continue
            count = 1 if options.default else 0
            settings = (case, options.repeats, count, int(options.brief))
            rows[key] = launch(HERE / "measure.py", 2, transport, *settings)
            rows[key] |= {"repeats": options.repeats, "code": _code()}
            options.rows.write_text(json.dumps(rows, indent=1) + "\n")
            print(*_lines(key, rows[key]), sep="\n", flush=True)
    table = [
        "| case | transport | plan | ours | one thread | two threads | bound | over one thread "
        "| over two threads | bound over one thread | bound that meets | share of that "
        "| with channels last: over one, two threads; bound over one thread | repeats | code |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
        *(line for key, row in rows.items() for line in _lines(key, row)),
    ]
    text = "\n".join(table)
    bars = "Asked for over MPI: 1.8x and 1.0x, without batch norm 1.9x and 1.1x; misses say so."
    about = f"{header} {bars} [notes.md](notes.md) says what was found and tried."
    options.rows.with_suffix(".md").write_text(f"# Spatial: results\n\n{about}\n\n{text}\n")


def _lines(key: str, row: dict[str, Any]) -> list[str]:
    """Return the rows of the table that belong to one case."""
    case, transport = key.split()
    one, two, bound, meeting = (row[name] for name in ("one", "two", "bound", "meeting"))
    bars = BARS[case.split(":")[0]]
    lines = []
    for variant in row["variants"]:
        ours = row[variant]
        over = [
            f"{value:.2f}x" if value >= bar else f"{value:.2f}x < {bar}x"
            for value, bar in zip((one / ours, two / ours), bars, strict=True)
        ]
        lines.append(
            f"| {case} | {transport} | `{variant}` | {ours:.3f} | {one:.3f} | {two:.3f} | {bound:.3f} "
            f"| {over[0]} | {over[1]} | {one / bound:.2f}x | {one / meeting:.2f}x "
            f"| {meeting / ours:.0%} | {_turned(row, ours)} | {row['repeats']} | {row.get('code', '')} |"
        )
    return lines


def _code() -> str:
    """Return the commit that is measured."""
    words = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def _turned(row: dict[str, Any], ours: float) -> str:
    """Return what is left of the speed-up if the one process had been told to put channels last."""
    words = [f"{row[name] / ours:.2f}x" for name in ("one last", "two last") if name in row]
    if "bound last" in row:
        words.append(f"{row['one last'] / row['bound last']:.2f}x")
    return ", ".join(words)


if __name__ == "__main__":
    main()
