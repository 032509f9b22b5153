"""Every keras.applications model, split and compared with Keras: `python benchmarks/keras/applications.py`.

Each model is compared calm, with an epsilon of 1 in its batch norms, and as Keras builds it. Resumable: each
(model, plan) is run once and kept in applications.json; applications.md is the table. With `--seconds 240` it
stops after the model that runs then; call it again for the rest.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
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


def key(model: str, plan: str, calm: bool) -> str:
    """Return the name of a row."""
    return f"{model} {plan}{' calm' if calm else ''}"


def verdict(row: dict[str, Any]) -> str:
    """Say whether a case equals Keras: exactly, or not more exactly than Keras equals itself."""
    if "failed" in row:
        return f"failed: {row['failed']}"
    if row["difference"] <= EXACT:
        return "equal"
    return "no further than its own chaos" if row["difference"] <= MARGIN * row["own"] else "DIFFERENT"


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the results as a table, one line per model."""
    lines = [
        "# keras.applications models under plans, against Keras itself",
        "",
        "`python benchmarks/keras/applications.py`: one training step, smallest input, batch 2, float64,",
        "dropout off. A cell is the largest difference from Keras over outputs, all gradients and all",
        "moving averages, each relative to its tensor's largest value; equal means at most 1e-9. `own` is",
        "what Keras makes of its input with the last bits changed. As built, many models divide by the",
        "variance of two numbers, again and again, and Keras itself is as far from itself as one likes: a",
        "cell marked ~ is at most 100 times `own` and proves little where `own` is large. Calm models are",
        "the same with an epsilon of 1 in their batch norms, and leave no such room. NASNetMobile cannot be",
        "built on torch.",
    ]
    for calm, title in ((True, "Calm"), (False, "As built")):
        lines += [
            "",
            f"## {title}",
            "",
            f"| model | layers | run whole | own | {' | '.join(PLANS)} | commit |",
            "|---|---:|---:|---:|---:|---:|---:|---|",
            *(_line(rows, model, calm) for model in MODELS),
        ]
        for plan in PLANS:
            verdicts = [verdict(r) for r in rows.values() if (r["plan"], r["calm"]) == (plan, calm)]
            equal, near = verdicts.count("equal"), verdicts.count("no further than its own chaos")
            lines += ["", f"`{plan}`: {equal} of {len(MODELS)} models equal{f', {near} ~' if near else ''}."]
    return "\n".join([*lines, ""])


def _line(rows: dict[str, dict[str, Any]], model: str, calm: bool) -> str:
    found = {plan: rows[key(model, plan, calm)] for plan in PLANS if key(model, plan, calm) in rows}
    if not found:
        return f"| {model} | | | | {' | '.join(['not run'] * len(PLANS))} | |"
    first, *_ = found.values()
    cells = [cell(found[plan]) if plan in found else "not run" for plan in PLANS]
    commits = "/".join(dict.fromkeys(row["commit"] for row in found.values()))
    head = f"| {model} | {first['layers']} | {first['opaque']} | {first['own']:.0e} |"
    return f"{head} {' | '.join(cells)} | {commits} |"


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
    for calm, model in itertools.product((True, False), options.models):
        known = {plan: rows.get(key(model, plan, calm)) for plan in options.plans}
        left = {
            plan: PLANS[plan]
            for plan, row in known.items()
            if row is None or options.again or (options.failed and "failed" in row)
        }
        if not left or time.monotonic() - begun > options.seconds:
            continue

        def work(model: str = model, calm: bool = calm, left: dict[str, int] = left) -> None:
            compare(model, calm, left, options.limit, keep)

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
    name = key(row["model"], row["plan"], row["calm"])
    rows[name] = {**row, "commit": commit()}
    print(f"{name}: {verdict(row)}, {row['seconds']:.0f} s", flush=True)
    KEPT.write_text(json.dumps(rows, indent=1) + "\n")
    TABLE.write_text(table(rows))


if __name__ == "__main__":
    main()
