"""What each rank does in the tests of Keras models."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A rank finds this file by its path alone; the models choose Keras's backend.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import keras
import keras_models
import numpy as np
import torch
from keras_models import as_called, double_precision, random_inputs

import shardwise as sw
from shardwise.graph.keras import wrap
from shardwise.graph.trace import leaves
from shardwise.keras.state import agree_random
from shardwise.plan import Plan, mesh_of
from shardwise.runtime.fabric import Fabric

Logs = dict[str, list[float]]


def step_difference(name: str, plan: str, batch: int) -> float:
    """Train one step under a plan; return how far loss, gradients and averages are from Keras's own."""
    make, shapes = keras_models.MODELS[name]
    with double_precision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = []
        for _ in range(2):
            keras.utils.set_random_seed(1)
            models.append(make())
        model, reference = models
        for layer in (*model._flatten_layers(), *reference._flatten_layers()):
            if isinstance(layer, keras.layers.SpatialDropout2D):
                layer.rate = 0  # masks are drawn differently
        inputs = random_inputs(tuple((batch, *shape[1:]) for shape in shapes))
        # Not around zero: gradients that are zero in exact arithmetic hold nothing but rounding.
        target = torch.linspace(-1, 2, batch, dtype=torch.float64)
        given = as_called(model, inputs)
        trainer = sw.Trainer(model, (given, target), plan, loss=loss)
        value = trainer.step(given, target)
        module = wrap(reference)
        module.learn(given)
        module.train()
        wanted = loss(module(*inputs), target)
        wanted.backward()
        gradients, state = trainer.gradients(), trainer.state_dict()
        names = [entry.name for entry in wrap(model).variables]
    pairs = [(torch.tensor(value, dtype=torch.float64), wanted.detach())]
    for entry, own in zip(module.variables, names, strict=True):
        if entry.is_trained:
            pairs.append((gradients[own], entry.view.apply(entry.variable.value.grad)))
        elif own in state and entry.variable.value.is_floating_point():
            pairs.append((state[own], entry.variable.value.detach()))
    largest = max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max()) / max(float(b.abs().max()), 1e-6 * largest) for a, b in pairs)


def loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    """Return a mean over samples that depends on all outputs."""
    flat = torch.cat([t.flatten(1) for t in leaves(outputs)], 1)
    return ((flat - target[:, None]) ** 2).mean()


def data(samples: int = 24) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(samples, 20, 18, 3)).astype(keras.config.floatx())
    return x, generator.integers(0, 5, (samples,))


def compiled(**settings: Any) -> Any:
    keras.utils.set_random_seed(settings.pop("seed", 1))
    model = keras_models.residual(penalty=settings.pop("penalty", 0.0))
    settings.setdefault("optimizer", keras.optimizers.Adam(1e-3))
    settings.setdefault("metrics", ["accuracy"])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), **settings)
    keras.utils.set_random_seed(7)
    return model


def trained(
    plan: str | None, case: str = "plain", *, double: bool = True, epochs: int = 4
) -> tuple[Logs, np.ndarray]:
    """Return the history and the predictions of a model that was trained under a plan, or by stock Keras."""
    with double_precision() if double else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, y = data()
        compiling, fitting = CASES[case](x, y)
        model = compiled(**compiling)
        if plan is not None:
            sw.keras.distribute(model, plan)
        history: Logs = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, **fitting).history
        return history, model.predict(x, verbose=0)


def _plain(x: Any, y: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {}, {"validation_data": (x[:10], y[:10])}


def _weights(x: Any, y: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    metric = keras.metrics.SparseCategoricalAccuracy()
    return {"weighted_metrics": [metric]}, {"class_weight": {0: 2.0, 1: 1.0, 2: 0.5, 3: 1.0, 4: 3.0}}


def _clipped(x: Any, y: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.7)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, global_clipnorm=0.05)
    return {"optimizer": optimizer, "penalty": 0.01}, {"validation_split": 0.25}


def _stopped(x: Any, y: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    callbacks = [
        keras.callbacks.EarlyStopping("loss", min_delta=0.07, patience=1, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=0.2),
    ]
    return {}, {"callbacks": callbacks, "sample_weight": np.linspace(0.5, 1.5, len(x)), "shuffle": False}


CASES: dict[str, Callable[[Any, Any], tuple[dict[str, Any], dict[str, Any]]]] = {
    "plain": _plain,
    "weights": _weights,
    "clipped": _clipped,
    "stopped": _stopped,
}


def two_outputs(plan: str | None) -> Logs:
    """Return the history of a model with two inputs and two weighted losses."""
    generator = np.random.default_rng(1)
    x = {name: generator.normal(size=(12, 8, 8, 3)).astype("float32") for name in ("left", "right")}
    y = {"kind": generator.integers(0, 3, (12,)), "size": generator.normal(size=(12, 1)).astype("float32")}
    keras.utils.set_random_seed(1)
    model = keras_models.several()
    model.compile(
        optimizer="rmsprop",
        loss={"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"]},
    )
    if plan is not None:
        sw.keras.distribute(model, plan)
    history: Logs = model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0).history
    return history


def saved(folder: str) -> tuple[np.ndarray, str]:
    """Train by HyPar-Flow's words with a checkpoint, save on rank 0; return the predictions and the plan."""
    x, y = data()
    model = compiled()
    checkpoint = keras.callbacks.ModelCheckpoint(str(Path(folder) / "checkpoint-{epoch}.keras"))
    plans: list[str] = []
    note = keras.callbacks.LambdaCallback(
        on_train_end=lambda logs: plans.append(str(model._shardwise.trainer.plan))
    )
    parts = [6, len(model.layers) - 1 - 6]
    strategy = {"strategy": "model", "num_partitions": 2, "layers_per_partition": parts}
    fitting = {"batch_size": 8, "epochs": 2, "verbose": 0, "callbacks": [checkpoint, note]}
    sw.fit(model, x, y, **strategy, **fitting)
    assert "fit" not in vars(model), "the model is stock again"
    if sw.init().rank == 0:
        model.save(Path(folder) / "model.keras")
        np.save(Path(folder) / "x.npy", x)
    return model.predict(x, verbose=0), plans[0]


def by_strategy() -> tuple[str, list[str]]:
    """Return the plan and the stages' first layers of HyPar-Flow's model strategy."""
    model = compiled()
    counts = [6, len(model.layers) - 1 - 6]
    sw.keras.distribute(model, strategy="model", num_partitions=2, layers_per_partition=counts)
    x, y = data(8)
    model.fit(x, y, batch_size=8, verbose=0)
    trainer = model._shardwise.trainer
    return str(trainer.plan), [trainer.graph.layers[cut].name for cut in trainer.cuts]


def without_weights(plan: str | None) -> tuple[Logs, float, np.ndarray, list[np.ndarray]]:
    """Train a model that was built weightless, or a stock one without a plan.

    Returns: its history, how much of weights and optimizer state this rank held, and what it predicts and
    the optimizer's momenta after everything was gathered.
    """
    with double_precision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, y = data(16)
        with contextlib.nullcontext() if plan is None else sw.keras.weightless():
            model = compiled()
        if plan is not None:
            sw.keras.distribute(model, plan)
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
        state = [*model.variables, *model.optimizer.variables]
        sizes = [v.value.numel() for v in state]
        held = sum(n for v, n in zip(state, sizes, strict=True) if not v.value.is_meta) / sum(sizes)
        sw.keras.gather(model)
        moments = [np.array(v) for v in model.optimizer.variables[2:]]
        return history, held, model.predict(x, verbose=0), moments


def continued(plan: str | None, folder: str, *, weightless: bool = False) -> tuple[Logs, list[np.ndarray]]:
    """Load weights, fit twice, compile anew, load again and fit; return the losses and everything trained."""
    file = str(Path(folder) / "start.weights.h5")
    with double_precision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, y = data(16)
        with sw.keras.weightless() if weightless else contextlib.nullcontext():
            model = compiled(seed=5)
        model.load_weights(file)
        if plan is not None:
            sw.keras.distribute(model, plan)
        fitting = {"batch_size": 8, "shuffle": False, "verbose": 0}
        losses = [model.fit(x, y, **fitting).history["loss"][0] for _ in range(2)]
        model.compile(optimizer=keras.optimizers.Adam(2e-3), loss=model.loss)
        losses += model.fit(x, y, **fitting).history["loss"]
        model.load_weights(file)
        losses += model.fit(x, y, **fitting).history["loss"]
        sw.keras.gather(model)
        losses.append(model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)["loss"])
        state = [v.value.detach().numpy() for v in (*model.variables, *model.optimizer.variables)]
    return {"loss": losses}, state


def loaded_alone(folder: str) -> str:
    """Return why a model without weights does not train when rank 0 alone loaded some."""
    with sw.keras.weightless():
        model = compiled()
    if sw.init().rank == 0:
        model.load_weights(str(Path(folder) / "start.weights.h5"))
    sw.keras.distribute(model, "stages=2")
    try:
        model.fit(*data(8), verbose=0)
    except ValueError as error:
        return str(error)
    return ""


class Board(keras.callbacks.TensorBoard):
    """Write a line where Keras's own, which needs TensorFlow, writes a summary."""

    def set_model(self, model: Any) -> None:
        self._model = model

    def on_train_begin(self, logs: Any = None) -> None: ...

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None: ...

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...

    def on_test_begin(self, logs: Any = None) -> None: ...

    def on_train_end(self, logs: Any = None) -> None: ...

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        with open(self.log_dir, "a") as file:
            print(epoch, sorted(logs or {}), file=file)


class Halt(keras.callbacks.Callback):
    """Stop after the first mini-batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = True


class Early(keras.callbacks.Callback):
    """Stop after two epochs, on rank 0 only, which also counts mini-batches in its learning rate."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1 and sw.init().rank == 0:
            self.model.stop_training = True


def housekeeping(plan: str, folder: str) -> dict[str, Any]:
    """Train with a frozen layer and callbacks; return what came of them on this rank."""
    x, y = data(16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = compiled()
        model.layers[4].trainable = False
        model.compile(optimizer="adam", loss=model.loss, metrics=["accuracy"])
        before = [np.array(v) for v in model.variables]
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (epoch + 1))
        callbacks = [rates, Early(), Board(str(Path(folder) / f"board{sw.init().rank}"))]
        callbacks.append(keras.callbacks.CSVLogger(str(Path(folder) / f"logs{sw.init().rank}.csv")))
        sw.keras.distribute(model, plan)
        with contextlib.redirect_stdout(io.StringIO()) as screen:
            history = model.fit(x, y, batch_size=8, epochs=4, callbacks=callbacks, verbose=2)
        lonely = [Halt()] if sw.init().rank == 1 else []
        seen: list[int] = []
        counts = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
        model.fit(x, y, batch_size=8, epochs=4, callbacks=[counts, *lonely], verbose=0)
        rate = float(model.optimizer.learning_rate)
        slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 1e-4)
        model.fit(x, y, batch_size=8, callbacks=[slower] if sw.init().rank == 0 else [], verbose=0)
    changed = {
        v.path: not np.array_equal(a, np.array(v)) for v, a in zip(model.variables, before, strict=True)
    }
    frozen = {v.path for v in model.layers[4].variables}
    return {
        "epochs": history.epoch,
        "rate": rate,
        "later": float(model.optimizer.learning_rate),
        "seen": seen,
        "screen": screen.getvalue(),
        "frozen": {changed[path] for path in frozen},
        "others": {changed[path] for path in changed.keys() - frozen},
        "files": sorted(p.name for p in Path(folder).iterdir()),
    }


def dropped(plan: str, name: str = "residual") -> tuple[Logs, list[np.ndarray]]:
    """Return the history of a model with dropout, and what it keeps besides weights: averages and seeds."""
    keras.utils.clear_session()  # masks depend on the names of layers, which Keras counts
    with double_precision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, y = data(16)
        keras.utils.set_random_seed(1)
        if name == "blocks":
            model = keras_models.blocks(0.4)
            x = x[:, :8, :8]
        else:
            model = keras_models.residual(dropout=0.4)
        model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        sw.keras.distribute(model, plan)
        history: Logs = model.fit(x, y % 3, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return history, [v.value.detach().numpy() for v in model.non_trainable_variables]


def averaged() -> str:
    """Return why a model whose optimizer averages all weights does not train in stages."""
    model = compiled(optimizer=keras.optimizers.SGD(use_ema=True))
    sw.keras.distribute(model, "stages=2")
    try:
        model.fit(*data(8), verbose=0)
    except ValueError as error:
        return str(error)
    return ""


def named() -> str:
    """Return why ranks whose layers have different names do not share dropout masks."""
    keras.utils.clear_session()
    for _ in range(sw.init().rank):
        keras.layers.Dropout(0.1)  # Keras counts
    model = keras_models.residual(dropout=0.4)
    model.compile(optimizer="sgd", loss="mse")
    sw.keras.distribute(model, "spatial=2x1")
    try:
        model.fit(data(8)[0], np.zeros((8, 5)), verbose=0)
    except ValueError as error:
        return str(error)
    return ""


def drawn() -> tuple[float, float, float]:
    """Seed each rank differently, agree, and return what each generator draws."""
    rank = sw.init().rank
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    agree_random(Fabric(mesh_of(Plan(data=2))).world, rank)
    return random.random(), float(np.random.random()), float(torch.rand(()))
