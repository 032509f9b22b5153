"""The compiled Keras optimizer, applied to the variables that this rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import torch
from torch import nn

from shardwise.geometry import Box
from shardwise.graph.keras.variables import Named
from shardwise.keras.first import value_of
from shardwise.keras.penalties import Penalties
from shardwise.keras.state import slot_lists
from shardwise.training.trainer import Trainer

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Nadam", "Ftrl", "Lion")


class LocalOptimizer:
    """Update this rank's variables with the user's own optimizer, as it would update them all.

    Weights that are cut over ranks get a second optimizer of the same settings, on variables for the slices.
    """

    def __init__(
        self,
        model: Any,
        trainer: Trainer,
        entries: Iterable[Named],
        penalties: Penalties,
        previous: LocalOptimizer | None = None,
    ) -> None:
        self.optimizer, self.trainer, self.penalties = model.optimizer, trainer, penalties
        self.whole: list[tuple[Named, nn.Parameter]] = []
        self.cut: list[tuple[Named, Any, nn.Parameter]] = []
        self.clip = self.optimizer.global_clipnorm
        if self.clip is not None and self.optimizer.gradient_accumulation_steps:
            raise ValueError("global_clipnorm together with gradient_accumulation_steps is not supported")
        entries = list(entries)
        for entry in entries:
            parameter = trainer.store.parameters.get(entry.name)
            if parameter is None or not entry.is_trained or not parameter.numel():
                continue
            if trainer.store.boxes[entry.name] == Box.whole(trainer.placement.shapes[entry.name]):
                self.whole.append((entry, parameter))
            else:
                own = keras.Variable(parameter, name=entry.variable.name)
                self.cut.append((entry, own, parameter))
        if self.optimizer.use_ema and len(self.whole) < len(model.trainable_variables):
            raise ValueError("use_ema needs all weights on every rank: use data=, spatial= or batch= plans")
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self.twin: Any = self._twin() if self.cut else None
        self.pieces = self._pieces(previous)

    def _twin(self) -> Any:
        check_elementwise(self.optimizer)
        twin = type(self.optimizer).from_config(self.optimizer.get_config())
        twin.global_clipnorm = None
        twin.build([variable for _, variable, _ in self.cut])
        return twin

    def _pieces(self, previous: LocalOptimizer | None) -> dict[int, torch.Tensor]:
        """Return the twin's slices of what the optimizer keeps, by the ids of the whole, with their values.

        These are the optimizer's own, or, where that has none, those of the trainer before.
        """
        if self.twin is None:
            return {}
        before = previous.pieces if previous is not None and previous.optimizer is self.optimizer else {}
        numbers = {id(v): i for i, v in enumerate(self.optimizer._trainable_variables)}
        whole, result = slot_lists(self.optimizer), {}
        for name, own in slot_lists(self.twin).items():
            for (entry, _, _), piece in zip(self.cut, own, strict=True):
                slot = whole[name][numbers[id(entry.variable)]]
                box = self.trainer.store.boxes[entry.name]
                value = before.get(id(slot))
                if value is None:
                    value = entry.view.apply(value_of(slot))[box.slices()]
                piece.assign(value)
                result[id(slot)] = piece.value
        return result

    def step(self) -> None:
        """Add the regularizers' gradients, clip, and update."""
        self.penalties.add()
        scale = self._scale()
        with torch.no_grad():
            now = int(self.optimizer.iterations.value)
            pairs = [
                (entry.view.invert(_scaled(p, scale), tuple(entry.variable.shape)), entry.variable)
                for entry, p in self.whole
                if p.grad is not None
            ]
            limit, self.optimizer.global_clipnorm = self.optimizer.global_clipnorm, None
            if pairs:
                self.optimizer.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])
            self.optimizer.global_clipnorm = limit
            self.optimizer.iterations.assign(now + 1)
            if self.twin is not None:
                self._step_twin(now, scale)

    def _step_twin(self, now: int, scale: float) -> None:
        if isinstance(self.twin._learning_rate, keras.Variable):
            self.twin._learning_rate.assign(self.optimizer._learning_rate)
        self.twin.iterations.assign(now)
        pairs = [(_scaled(p, scale), variable) for _, variable, p in self.cut if p.grad is not None]
        self.twin.apply([grad for grad, _ in pairs], [variable for _, variable in pairs])

    def _scale(self) -> float:
        """Return what to multiply gradients with, so that their norm over all ranks is at most the limit."""
        if self.clip is None:
            return 1.0
        trainer = self.trainer
        total = torch.zeros((), dtype=torch.float64, device=trainer.device)
        for name, parameter in trainer.store.parameters.items():
            box = trainer.store.boxes[name]
            if parameter.grad is None or box.empty:
                continue
            if trainer.placement.owner(name, box) == trainer.fabric.rank:
                total += parameter.grad.double().square().sum()
        trainer.fabric.world.all_reduce(total)
        norm = float(total.sqrt())
        return float(self.clip) * min(1.0 / norm, 1.0 / float(self.clip)) if norm else 1.0


def check_elementwise(optimizer: Any) -> None:
    """Refuse an optimizer that could not update slices of weights as it updates the whole."""
    known = any(base.__name__ in _ELEMENTWISE for base in type(optimizer).__mro__)
    if not known or optimizer.clipnorm is not None:
        raise ValueError(
            f"the optimizer {type(optimizer).__name__} reads whole weights, but the plan cuts some over "
            f"ranks; use one of {', '.join(_ELEMENTWISE)} without clipnorm, or another plan"
        )


def _scaled(parameter: nn.Parameter, scale: float) -> torch.Tensor:
    if parameter.grad is None:
        raise ValueError("there is no gradient to scale")
    return parameter.grad if scale == 1.0 else parameter.grad * scale
