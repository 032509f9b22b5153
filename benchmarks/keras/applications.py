"""Every keras.applications model, split and compared with Keras: `python benchmarks/keras/applications.py`.

Resumable: each (model, plan) is run once and kept in applications.json; applications.md is the table. With
`--seconds 240` it stops after the model that runs then; call it again for the rest.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

from forked import run_alone
from one_model import compare

HERE = Path(__file__).resolve().parent
KEPT, TABLE = HERE / "applications.json", HERE / "applications.md"
LOCK = Path(tempfile.gettempdir()) / "shardwise-applications.lock"
PLANS = {"stages=2": 2, "stages=4": 4, "spatial=2x1": 2}
MODELS = [
    "MobileNetV3Small",
    "MobileNetV2",
    "MobileNet",
    "MobileNetV3Large",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "DenseNet121",
    "EfficientNetB1",
    "EfficientNetV2B1",
    "EfficientNetB2",
    "EfficientNetV2B2",
    "ResNet50",
    "ResNet50V2",
    "EfficientNetB3",
    "EfficientNetV2B3",
    "DenseNet169",
    "Xception",
    "InceptionV3",
    "EfficientNetB4",
    "DenseNet201",
    "EfficientNetV2S",
    "ConvNeXtTiny",
    "VGG16",
    "VGG19",
    "ResNet101",
    "ResNet101V2",
    "EfficientNetB5",
    "EfficientNetB6",
    "ConvNeXtSmall",
    "ResNet152",
    "ResNet152V2",
    "InceptionResNetV2",
    "EfficientNetV2M",
    "EfficientNetB7",
    "NASNetLarge",
    "ConvNeXtBase",
    "EfficientNetV2L",
    "ConvNeXtLarge",
    "ConvNeXtXLarge",
]
EXACT, MARGIN = 1e-9, 100.0


def commit() -> str:
    """Return which version of the code runs."""
    command = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def verdict(row: dict[str, Any]) -> str:
    """Say whether a case equals Keras: exactly, or as far as Keras equals itself with other last bits."""
    if "failed" in row:
        return f"failed: {row['failed']}"
    if row["difference"] <= EXACT:
        return "equal"
    return "equal within its own chaos" if row["difference"] <= MARGIN * row["own"] else "DIFFERENT"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the results as a table, one line per model."""
    lines = [
        "# keras.applications models under plans, against Keras itself",
        "",
        "`python benchmarks/keras/applications.py`: one training step, smallest input, batch 2, float64,",
        "dropout off. A cell is the largest difference from Keras over outputs, all gradients and all moving",
        "averages, each relative to its tensor's largest value. `own` is what Keras makes of its input",
        "with the last bits changed: batch norm over two values is chaotic. Equal means at most 1e-9 or,",
        "marked ~, at most 100 times `own`. NASNetMobile cannot be built on torch.",
        "",
        f"| model | layers | run whole | own | {' | '.join(PLANS)} | commit |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for model in MODELS:
        found = {plan: rows[f"{model} {plan}"] for plan in PLANS if f"{model} {plan}" in rows}
        if not found:
            lines.append(f"| {model} | | | | {' | '.join(['not run'] * len(PLANS))} | |")
            continue
        first, *_ = found.values()
        cells = [cell(found[plan]) if plan in found else "not run" for plan in PLANS]
        commits = "/".join(dict.fromkeys(row["commit"] for row in found.values()))
        head = f"| {model} | {first['layers']} | {first['opaque']} | {first['own']:.0e} |"
        lines.append(f"{head} {' | '.join(cells)} | {commits} |")
    for plan in PLANS:
        good = sum(verdict(row).startswith("equal") for row in rows.values() if row["plan"] == plan)
        lines += ["", f"`{plan}`: {good} of {len(MODELS)} models equal."]
    return "\n".join([*lines, ""])


def cell(row: dict[str, Any]) -> str:
    """Return the outcome of one case in a few characters."""
    found = verdict(row)
    if "difference" not in row:
        return found
    return f"{row['difference']:.0e}{ {'equal': '', 'DIFFERENT': ' DIFFERENT'}.get(found, ' ~') }"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no model after so long")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of one case")
    parser.add_argument("--again", action="store_true", help="run the chosen cases again")
    parser.add_argument("--failed", action="store_true", help="run failed cases again")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    begun = time.monotonic()
    for model in options.models:
        known = {plan: rows.get(f"{model} {plan}") for plan in options.plans}
        left = {
            plan: PLANS[plan]
            for plan, row in known.items()
            if row is None or options.again or (options.failed and not verdict(row).startswith("equal"))
        }
        if not left or time.monotonic() - begun > options.seconds:
            continue

        def work(model: str = model, left: dict[str, int] = left) -> None:
            compare(model, left, options.limit, keep)

        try:
            run_alone(work)
        except RuntimeError as error:
            print(model, error, flush=True)
        print(f"{model}: {time.monotonic() - begun:.0f} s so far", flush=True)


def keep(row: dict[str, Any]) -> None:
    """Add a row to the file and write the table anew; other calls of this command may do so too."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _keep(row)


def _keep(row: dict[str, Any]) -> None:
    rows = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    rows[f"{row['model']} {row['plan']}"] = {**row, "commit": commit()}
    print(f"{row['model']} {row['plan']}: {verdict(row)}, {row['seconds']:.0f} s", flush=True)
    KEPT.write_text(json.dumps(rows, indent=1) + "\n")
    TABLE.write_text(table(rows))


if __name__ == "__main__":
    main()
