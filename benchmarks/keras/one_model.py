"""One keras.applications model under several plans, against Keras itself.

The model is built, captured and run by Keras once, in the process that then forks the ranks: they share its
memory, and each compares what it holds. They talk over Gloo, since a forked process cannot join MPI.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import keras
import torch
from forked import run_ranks
from keras.src.backend.common import dtypes
from torch import Tensor

import shardwise as sw
from shardwise.graph.keras import KerasModule
from shardwise.training.loss_graph import WholeLoss

SMALLEST = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}
BATCH = 2
_LAST_BITS = 4e-16


class Captured(KerasModule):
    """A model whose graph is captured once for all plans."""

    kept: Any = None

    def capture(self, example: Any, *, training: bool, check: bool) -> Any:
        """Return the graph; what it computes is compared with Keras after each step."""
        if self.kept is None:
            self.kept = super().capture(example, training=training, check=False)
        return self.kept


class Watched(WholeLoss):
    """Cross-entropy of probabilities that keeps the outputs it saw."""

    def __init__(self) -> None:
        self.seen: Tensor | None = None

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss."""
        self.seen = outputs.detach()
        return -(outputs.clamp(min=1e-12).log() * target).sum(1).mean()


def build(name: str, calm: bool) -> Any:
    """Return the model for its smallest input, in double precision and without dropout.

    A calm one adds 1 to the variances of its batch norms: at the smallest input these are variances of two
    numbers, and dividing by them layer after layer makes any rounding as large as the results.
    """
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    # Keras on torch multiplies matrices in single precision otherwise, whatever floatx says.
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.utils.set_random_seed(0)
    size = SMALLEST.get(name, 32)
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0  # masks are drawn differently
        if calm and isinstance(layer, keras.layers.BatchNormalization):
            layer.epsilon = 1.0
    return model


def reference(module: KerasModule, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return outputs, gradients and averages of one step of Keras; the model is left as it was."""
    start = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.train()
    output = module(x)
    Watched()(output, y).backward()
    result = {"output": output.detach()}
    for entry in module.variables:
        if entry.is_trained:
            result[entry.name] = entry.view.apply(entry.variable.value.grad)
            entry.variable.value.grad = None
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, start[name]):  # constants and seeds stay as they are
            result[name] = buffer.clone()
        buffer.copy_(start[name])
    return result


def differences(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], largest: float
) -> dict[str, float]:
    """Return how far tensors are off by name, relative to the largest value of each."""
    result = {}
    for name, tensor in found.items():
        scale = max(float(wanted[name].abs().max()), 1e-6 * largest)
        result[name] = float((tensor - wanted[name]).abs().max()) / scale
    return result


def one_rank(module: Captured, plan: str, x: Tensor, y: Tensor, wanted: Mapping[str, Tensor]) -> Any:
    """Train one step under a plan; return how far each tensor of this rank is from Keras's."""
    sw.init(backend="gloo")
    loss = Watched()
    trainer = sw.Trainer(module, (x, y), plan, loss=loss)
    trainer.step(x, y)
    found = {name: p.grad for name, p in trainer.store.parameters.items() if p.grad is not None}
    found |= {n: t for n, t in trainer.store.tensors.items() if n in wanted and n not in found}
    found |= {} if loss.seen is None else {"output": loss.seen}
    return differences(found, wanted, max(float(t.abs().max()) for t in wanted.values()))


def compare(name: str, calm: bool, plans: Mapping[str, int], seconds: float, keep: Any) -> None:
    """Run a model under plans and give each row to `keep`."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    module = Captured(build(name, calm))
    shape = module.model.input_shape[1:]
    x = torch.randn((BATCH, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.nn.functional.one_hot(torch.arange(BATCH), 10).double()
    graph = module.capture((x,), training=True, check=False)
    wanted = reference(module, x, y)
    largest = max(float(t.abs().max()) for t in wanted.values())
    nearby = reference(module, x * (1 + _LAST_BITS * torch.sign(x)), y)
    own = max(differences(nearby, wanted, largest).values())
    del nearby
    shared = {
        "model": name,
        "calm": calm,
        "layers": len(graph),
        "opaque": sum(layer.kind == "other" for layer in graph),
        "own": own,
        "build": time.perf_counter() - begun,
    }
    for plan, ranks in plans.items():
        start = time.perf_counter()
        row = {**shared, "plan": plan}
        try:
            parts = run_ranks(one_rank, ranks, (module, plan, x, y, wanted), seconds)
            missing = wanted.keys() - {key for part in parts for key in part}
            if missing:
                raise RuntimeError(f"no rank has {sorted(missing)[:3]}")
            row["difference"] = max(value for part in parts for value in part.values())
        except RuntimeError as error:
            row["failed"] = str(error).strip().splitlines()[-1][:200]
        keep({**row, "seconds": time.perf_counter() - start})
