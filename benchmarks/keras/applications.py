"""Every keras.applications model, split and compared with Keras: `python benchmarks/keras/applications.py`.

Resumable: each (model, plan) is run once and kept in applications.json; applications.md is the table.
"""

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
KEPT, TABLE = HERE / "applications.json", HERE / "applications.md"
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


def run(model: str, plan: str, ranks: int, seconds: float) -> dict[str, Any]:
    """Run one case in processes of its own and return its row."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "row.json"
        script = [str(HERE / "one_model.py"), model, plan, str(target)]
        command = [sys.executable, "-m", "shardwise.cli", "run", "-n", str(ranks), *script]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"model": model, "plan": plan, "failed": f"not done in {seconds:.0f} s"}
        if not target.exists():
            lines = [line for line in (done.stderr + done.stdout).splitlines() if "Error" in line]
            return {"model": model, "plan": plan, "failed": lines[-1][:200] if lines else "it gave no result"}
        row: dict[str, Any] = json.loads(target.read_text())
        return row


def verdict(row: dict[str, Any]) -> str:
    """Say whether a case equals Keras: exactly, or as far as Keras equals itself with other last bits."""
    if "failed" in row:
        return f"failed: {row['failed']}"
    if row["difference"] <= EXACT:
        return "equal"
    return "equal within its own chaos" if row["difference"] <= MARGIN * row["own"] else "DIFFERENT"


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table."""
    lines = [
        "# keras.applications models under plans, against Keras itself",
        "",
        "One training step, smallest legal input, batch 2, float64, dropout off: loss, gradients and moving",
        "averages. `difference` is relative to the largest value of each tensor; `own` is what Keras makes",
        "of its input with the last bits changed: batch norm over two values is chaotic. NASNetMobile cannot",
        "be built on torch.",
        "",
        "| model | plan | layers | opaque | difference | own | verdict |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['model']} | {row['plan']} | | | | | {verdict(row)} |")
        else:
            lines.append(
                f"| {row['model']} | {row['plan']} | {row['layers']} | {row['opaque']} | "
                f"{row['difference']:.1e} | {row['own']:.1e} | {verdict(row)} |"
            )
    good = sum(verdict(row).startswith("equal") for row in rows)
    return "\n".join([*lines, "", f"{good} of {len(rows)} cases run so far are equal.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--plans", nargs="*", default=list(PLANS))
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of one case")
    parser.add_argument("--again", action="store_true", help="run failed cases again")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for model in options.models:
        for plan in options.plans:
            key = f"{model} {plan}"
            if key in rows and not (options.again and "failed" in rows[key]):
                continue
            rows[key] = run(model, plan, PLANS[plan], options.seconds)
            print(key, verdict(rows[key]), flush=True)
            KEPT.write_text(json.dumps(rows, indent=1) + "\n")
            TABLE.write_text(table(list(rows.values())))


if __name__ == "__main__":
    main()
