"""ResNet-1001-v2 in Keras: `shardwise run -n 4 benchmarks/keras/deep.py [plan] [batch] [steps]`.

Writes deep.md: for each rank the seconds of a step, the most memory the process had, how much of that it had
before the model was made (Python, torch and Keras themselves), and its share of the weights.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from measure import resnet_v2

import shardwise as sw

TABLE = Path(__file__).resolve().parent / "deep.md"


def megabytes() -> float:
    """Return the most memory that this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    plan, batch, steps = (*sys.argv[1:], *("stages=4", "2", "6")[len(sys.argv) - 1 :])
    torch.set_num_threads(1)
    session = sw.init()
    begun, before = time.perf_counter(), megabytes()
    with sw.keras.weightless():  # a rank has its own stage's variables only
        model = resnet_v2(1001)
    built = time.perf_counter() - begun
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=entropy)
    x = np.random.default_rng(0).normal(size=(int(batch) * int(steps), 32, 32, 3)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, (len(x),))
    sw.keras.distribute(model, plan)
    begun = time.perf_counter()
    (loss,) = model.fit(x, y, batch_size=int(batch), verbose=0).history["loss"]
    fitted = time.perf_counter() - begun
    trainer = model._shardwise.trainer
    step = statistics.median(trainer.step_seconds[1:])
    held = sum(v.value.nbytes for v in model.variables if not v.value.is_meta) / 2**20
    rows = torch.zeros((session.size, 6), dtype=torch.float64)
    first = fitted - sum(trainer.step_seconds[1:])
    rows[session.rank] = torch.tensor([built, first, step, before, megabytes(), held])
    trainer.fabric.world.all_reduce(rows)
    if session.rank == 0:
        text = table(rows.tolist(), f"`{plan}`, batch {batch}, {steps} steps", len(trainer.network), loss)
        TABLE.write_text(text)
        print(text, flush=True)


def table(rows: list[list[float]], what: str, layers: int, loss: float) -> str:
    """Return the measurements of all ranks as a table."""
    lines = [
        f"# ResNet-1001-v2 in Keras: {what}",
        "",
        "`shardwise run -n 4 benchmarks/keras/deep.py`: built weightless, 32x32 images, SGD, one thread per",
        "rank. The step is the median without the first, which captures, cuts and lowers; the peak is that",
        "of the process, `before` what Python, torch and Keras had of it already.",
        f"{layers} layers; mean loss {loss:.4f}.",
        "",
        "| rank | build s | first step s | step s | before MiB | peak MiB | weights MiB |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for rank, (built, first, step, before, peak, held) in enumerate(rows):
        cells = f"{built:.1f} | {first:.1f} | {step:.2f} | {before:.0f} | {peak:.0f} | {held:.1f}"
        lines.append(f"| {rank} | {cells} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
