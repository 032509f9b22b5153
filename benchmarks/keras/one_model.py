"""One rank: train one step of a keras.applications model under a plan, compare with Keras itself."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch
from keras.src.backend.common import dtypes

import shardwise as sw
from shardwise.graph.keras import KerasModule, wrap

SMALLEST = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}
BATCH = 2


def build(name: str) -> keras.Model:
    """Return the model for its smallest input, in double precision and without dropout."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    # Keras on torch multiplies matrices in single precision otherwise, whatever floatx says.
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.utils.set_random_seed(0)
    size = SMALLEST.get(name, 32)
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0
    return model


def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -(outputs.clamp(min=1e-12).log() * target).sum(1).mean()


def reference(module: KerasModule, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return output, gradients and averages of one step of Keras; the model is left as it was."""
    start = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.train()
    output = module(x)
    loss(output, y).backward()
    result = {"output": output.detach()}
    for entry in module.variables:
        if entry.is_trained:
            result[entry.name] = entry.view.apply(entry.variable.value.grad).clone()
            entry.variable.value.grad = None
    for name, buffer in module.named_buffers():
        result[name] = buffer.clone()
        buffer.copy_(start[name])
    return result


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    largest = max(float(t.double().abs().max()) for t in wanted.values())
    ratios = []
    for name, b in wanted.items():
        if name in found:
            scale = max(float(b.double().abs().max()), 1e-6 * largest)
            ratios.append(float((found[name].double() - b.double()).abs().max()) / scale)
    return max(ratios)


def main() -> None:
    name, plan, target = sys.argv[1:]
    torch.set_num_threads(1)
    session = sw.init()
    begun = time.perf_counter()
    model = build(name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((BATCH, *model.input_shape[1:]), generator=generator, dtype=torch.float64)
    y = torch.nn.functional.one_hot(torch.arange(BATCH) % 10, 10).double()
    module = wrap(model)
    wanted = reference(module, x, y)
    nearby = reference(module, x * (1 + 4e-16 * torch.sign(x)), y)
    trainer = sw.Trainer(model, (x, y), plan, loss=loss)
    value = trainer.step(x, y)
    # Of parameters the gradients are compared, of buffers the values.
    found = {**trainer.state_dict(), **trainer.gradients()}
    wanted["loss"], nearby["loss"] = loss(wanted.pop("output"), y), loss(nearby.pop("output"), y)
    found["loss"] = torch.tensor(value, dtype=torch.float64)
    if session.rank == 0:
        row = {
            "model": name,
            "plan": plan,
            "layers": len(trainer.network),
            "opaque": sum(layer.kind == "other" for layer in trainer.network),
            "difference": worst(found, wanted),
            "own": worst(nearby, wanted),
            "seconds": time.perf_counter() - begun,
        }
        Path(target).write_text(json.dumps(row))


if __name__ == "__main__":
    main()
