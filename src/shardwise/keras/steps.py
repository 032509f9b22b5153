"""One training or test step of Keras's loop, computed by all ranks together."""

from __future__ import annotations

from typing import Any

import keras
import torch
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight
from torch import Tensor

from shardwise.graph.keras import KerasModule
from shardwise.graph.keras.module import flat_inputs, input_symbols
from shardwise.graph.keras.variables import named_variables
from shardwise.graph.trace import leaves, transform
from shardwise.keras.layout import store_as_torch
from shardwise.keras.loss import KerasLoss, check_losses, structure_of
from shardwise.keras.optimizer import LocalOptimizer
from shardwise.keras.penalties import Penalties
from shardwise.keras.refusals import check_names, check_statistics
from shardwise.keras.weightless import adopt, initialiser, is_weightless, settle
from shardwise.plan import Plan, micro_batches_of
from shardwise.training.trainer import Trainer


class Steps:
    """The trainer of a Keras model, and the steps that Keras's loop calls.

    Args:
        model: a compiled model.
        plan: how it is split.
        data: the first mini-batch, `(x, y, sample_weight)`.
        seed: what dropout masks start from.
        previous: the steps before, which a model without weights of its own continues.
    """

    trainer: Trainer
    optimizer: LocalOptimizer

    def __init__(self, model: Any, plan: Plan, data: Any, seed: int, previous: Steps | None = None) -> None:
        x, y, weight = unpack_x_y_sample_weight(data)
        store_as_torch(model, named_variables(model))
        self.model, self.module = model, KerasModule(model)
        self.module.learn(x)
        self.structure = structure_of((y, weight))
        shares = plan.data * micro_batches_of(plan)
        check_losses(model, shares, weight is not None)
        self.gathers = bool(_metrics(model)) or keras.tree.is_nested(y)
        self.loss = KerasLoss(model, self.structure, keeps=self.gathers)
        inputs = tuple(inputs_of(model, data))
        self.trainer = Trainer(
            self.module,
            (inputs, self._targets(y, weight, inputs[0].shape[0])),
            plan,
            loss=self.loss,
            loss_mean="micro-batch",
            seed=seed,
            init=initialiser(self.module.variables, None if previous is None else previous.trainer),
        )
        check_statistics(self.trainer.network, plan)
        check_names(self.trainer.network, self.trainer)
        if self.module.masked:
            raise ValueError(
                f"outputs of Keras model {model.name!r} carry a mask, by which Keras leaves entries out of "
                "loss and metrics; that is not supported under a plan: let a last layer drop the mask, or "
                "pass sample weights"
            )
        entries = self.module.variables
        if is_weightless(model):
            adopt(self.trainer, model, entries)
        self.penalties = Penalties(self.trainer, entries)
        self.compiled = _compiled(model)
        before = None if previous is None else previous.optimizer
        self.optimizer = LocalOptimizer(model, self.trainer, entries, self.penalties, before)
        settle(self.trainer, model, entries)
        self.trainer.optimizer = self.optimizer  # type: ignore[assignment]

    def fits(self, data: Any) -> bool:
        """Tell whether this trainer was made for the structure of a mini-batch and the model as it is."""
        _, y, weight = unpack_x_y_sample_weight(data)
        trained = {id(v) for v in self.model.trainable_variables}
        same = {id(e.variable) for e in self.module.variables if e.is_trained} == trained
        return same and self.is_current() and structure_of((y, weight)) == self.structure

    def is_current(self) -> bool:
        """Tell whether the model is still compiled as it was."""
        return all(a is b for a, b in zip(self.compiled, _compiled(self.model), strict=True))

    def _targets(self, y: Any, weight: Any, batch: int) -> list[Tensor]:
        flat = [keras.ops.convert_to_tensor(t) for t in leaves((y, weight)) if t is not None]
        return [*flat, torch.arange(batch, device=flat[0].device if flat else None)]

    def train_step(self, data: Any) -> Any:
        """Train on a mini-batch, the same on every rank; return the logs."""
        x, y, weight = unpack_x_y_sample_weight(data)
        inputs = inputs_of(self.model, data)
        batch = inputs[0].shape[0]
        self.loss.begin(batch)
        value = self.trainer.step(tuple(inputs), self._targets(y, weight, batch))
        predictions = self._predictions(batch) if self.gathers else None
        return self._logs(x, y, weight, predictions, value, batch)

    def test_step(self, data: Any) -> Any:
        """Evaluate a mini-batch, the same on every rank; return the logs."""
        x, y, weight = unpack_x_y_sample_weight(data)
        inputs = inputs_of(self.model, data)
        predictions = self.trainer.predict(tuple(inputs))
        self.penalties.measure()
        return self._logs(x, y, weight, predictions, None, inputs[0].shape[0])

    def _logs(self, x: Any, y: Any, weight: Any, predictions: Any, value: float | None, batch: int) -> Any:
        with torch.no_grad():
            if predictions is not None:
                value = float(self.model._compile_loss(y, predictions, weight))
            total = torch.tensor(float(value or 0.0) + self.penalties.total(), dtype=torch.float64)
            self.model._loss_tracker.update_state(total.to(_floatx()), sample_weight=batch)
            if predictions is None:
                return self.model.get_metrics_result()
            return self.model.compute_metrics(x, y, predictions, sample_weight=weight)

    def _predictions(self, batch: int) -> Any:
        """Bring the predictions of the last training step to all ranks."""
        trainer = self.trainer
        graph = trainer.network
        mesh = trainer.fabric.mesh
        replica, _ = mesh.place(trainer.fabric.rank)
        speaks = any(
            mesh.group(replica, mesh.stages - 1, direction)[0] == trainer.fabric.rank
            for direction in mesh.directions
        )
        whole = []
        for i, name in enumerate(graph.output_names):
            spec = graph[name].spec
            dtype = getattr(torch, spec.dtype)
            tensor = torch.zeros((batch, *spec.shape[1:]), dtype=dtype, device=trainer.device)
            for samples, seen in self.loss.seen if speaks else ():
                tensor[samples] = seen[i]
            trainer.fabric.world.all_reduce(tensor)
            whole.append(tensor)
        given = iter(whole)
        return transform(graph.outputs, lambda _: next(given))


def _compiled(model: Any) -> tuple[Any, ...]:
    """Return what `compile` made."""
    return model.optimizer, model._compile_loss, model._compile_metrics


def inputs_of(model: Any, data: Any) -> list[Tensor]:
    """Return the inputs of a mini-batch in the order and precision that the model wants."""
    x, _, _ = unpack_x_y_sample_weight(data)
    result = []
    symbols = input_symbols(model)
    for i, tensor in enumerate(flat_inputs(model, x)):
        if symbols is None:
            result.append(keras.ops.convert_to_tensor(tensor))
            continue
        wanted = symbols[i]
        tensor = keras.ops.convert_to_tensor(tensor, dtype=wanted.dtype)
        if tensor.ndim == len(wanted.shape) - 1 and wanted.shape[-1] == 1:
            tensor = tensor.unsqueeze(-1)
        result.append(tensor)
    return result


def _floatx() -> torch.dtype:
    dtype: torch.dtype = getattr(torch, keras.config.floatx())
    return dtype


def _metrics(model: Any) -> list[Any]:
    """Return what is measured besides the loss."""
    compiled = model._compile_metrics
    return [m for m in model.metrics if m is not model._loss_tracker] if compiled is not None else []
