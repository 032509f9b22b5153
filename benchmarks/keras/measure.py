"""One rank: samples per second of stock `fit` and of `fit` under a plan, taking turns."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from keras import layers

import shardwise as sw


def resnet_v2(depth: int) -> Any:
    """Return the pre-activation ResNet of depth 9n+2 for 32x32 images, as in Keras's examples."""
    x = start = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same")(x)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range((depth - 2) // 9):
            stride = 2 if stage and not block else 1
            y = x
            for size, width, step in ((1, filters, stride), (3, filters, 1), (1, filters * 4, 1)):
                y = layers.Activation("relu")(layers.BatchNormalization()(y))
                y = layers.Conv2D(width, size, strides=step, padding="same")(y)
            if not block:
                x = layers.Conv2D(filters * 4, 1, strides=stride)(x)
            x = layers.Add()([x, y])
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    return keras.Model(start, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def resnet50(size: int) -> Any:
    """Return ResNet-50 for square images of a size."""
    return keras.applications.ResNet50(
        weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None
    )


MODELS = {
    "resnet50@224": (lambda: resnet50(224), 224),
    "resnet50@64": (lambda: resnet50(64), 64),
    "resnet110v2@32": (lambda: resnet_v2(110), 32),
}


def rate(model: Any, x: Any, y: Any, batch: int) -> tuple[float, float]:
    """Return samples per second of one epoch, and the part of the time that this process had a core."""
    start, used = time.perf_counter(), time.process_time()
    model.fit(x, y, batch_size=batch, epochs=1, verbose=0)
    seconds = time.perf_counter() - start
    return len(x) / seconds, (time.process_time() - used) / seconds


def main() -> None:
    name, plan, batch, steps, target = sys.argv[1:]
    torch.set_num_threads(1)
    session = sw.init()
    make, size = MODELS[name]
    # Two models: training under a plan lays kernels out anew in memory, which would help the stock one too.
    models = {"stock": make(), "plan": make()} if session.size == 1 else {"plan": make()}
    for model in models.values():
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="sgd", loss=entropy, metrics=["accuracy"])
    sw.keras.distribute(models["plan"], plan)
    samples = int(batch) * int(steps)
    x = np.random.default_rng(0).normal(size=(samples, size, size, 3)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, (samples,))
    rates: dict[str, list[tuple[float, float]]] = {key: [] for key in models}
    for _ in range(3):
        for key, model in models.items():
            rates[key].append(rate(model, x, y, int(batch)))
    if session.rank == 0:
        row: dict[str, Any] = {"model": name, "plan": plan, "ranks": session.size}
        for key, values in rates.items():
            # The first turn of each captures, allocates and warms up.
            row[f"{key}_rate"], row[f"{key}_busy"] = max(values[1:])
        Path(target).write_text(json.dumps(row))


if __name__ == "__main__":
    main()
