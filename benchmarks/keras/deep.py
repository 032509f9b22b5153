"""ResNet-1001-v2 in Keras: `shardwise run -n 4 benchmarks/keras/deep.py [plan] [batch] [steps]`.

Prints, for each rank, the seconds of a step, the most memory the process had, and how much it had before the
model was made: Python, torch and Keras themselves.
"""

from __future__ import annotations

import os
import resource
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from measure import resnet_v2

import shardwise as sw


def main() -> None:
    plan, batch, steps = (*sys.argv[1:], *("stages=4", "2", "2")[len(sys.argv) - 1 :])
    torch.set_num_threads(1)
    session = sw.init()
    begun = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with sw.keras.weightless():  # a rank has its own stage's variables only
        model = resnet_v2(1001)
    built = time.perf_counter()
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=entropy)
    x = np.random.default_rng(0).normal(size=(int(batch) * int(steps), 32, 32, 3)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, (len(x),))
    sw.keras.distribute(model, plan)
    model.fit(x, y, batch_size=int(batch), verbose=0)
    trainer = model._shardwise.trainer
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    last = trainer.step_seconds[-1]
    held = trainer.store.parameter_bytes / 2**20
    print(
        f"rank {session.rank}: {len(trainer.network)} layers, {plan}, batch {batch}: "
        f"build {built - begun:.0f} s, last step {last:.2f} s, peak {peak:.0f} MiB "
        f"({before:.0f} before), weights {held:.0f} MiB",
        flush=True,
    )


if __name__ == "__main__":
    main()
