"""Models without weights: built with shapes only, so that a rank ever holds just what its stage needs.

with sw.keras.weightless():
    model = make()                   # on every rank; nothing is allocated
sw.keras.distribute(model, "stages=4")
model.fit(x, y)                      # each rank has its own stage's weights and optimizer state
sw.keras.gather(model)               # now all ranks have everything: save, predict
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import torch
from keras import callbacks as stock
from torch import Tensor, nn

from shardwise.geometry import Box
from shardwise.graph.keras.variables import Named
from shardwise.keras.state import agree, slots
from shardwise.runtime.wire import Wire
from shardwise.training.trainer import Trainer

_FIRST = "_shardwise_first_values"
_NEED_ALL = (stock.ModelCheckpoint, stock.BackupAndRestore)


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Let Keras make variables that have a shape but no memory; their first values are drawn later.

    They are those that Keras would have drawn: its initializers fix their seeds when they are made.
    """
    base = keras.Variable
    usual = base._initialize_with_initializer

    def remember(variable: Any, initializer: Any) -> None:
        if not variable.shape or "float" not in variable.dtype:
            usual(variable, initializer)  # counters and seeds, which every rank needs
            return
        empty = torch.empty(variable.shape, dtype=getattr(torch, variable.dtype), device="meta")
        variable._value = nn.Parameter(empty, requires_grad=variable.trainable)
        setattr(variable, _FIRST, initializer)

    own = "_initialize_with_initializer" in vars(base)
    base._initialize_with_initializer = remember
    try:
        yield
    finally:
        if own:
            base._initialize_with_initializer = usual
        else:
            del base._initialize_with_initializer


def is_weightless(model: Any) -> bool:
    """Tell whether variables of a model have no memory."""
    return any(variable.value.is_meta for variable in model.variables)


def agree_on_seeds(world: Wire, rank: int, variables: Iterable[Any]) -> None:
    """Let every rank draw the first values that rank 0 would draw; collective."""
    makers = [vars(v)[_FIRST] for v in variables if _FIRST in vars(v)]
    random = [maker for maker in makers if isinstance(getattr(maker, "seed", None), int)]
    seeds = torch.tensor([maker.seed for maker in random], dtype=torch.int64)
    agree(world, rank, [seeds])
    for maker, seed in zip(random, seeds.tolist(), strict=True):
        maker.seed = seed


def first_values(variable: Any) -> Tensor:
    """Draw the first values of a variable without memory."""
    if _FIRST not in vars(variable):
        raise ValueError(
            f"variable {variable.path!r} has neither data nor an initializer; build the model inside of "
            "sw.keras.weightless()"
        )
    value: Tensor = keras.ops.convert_to_tensor(vars(variable)[_FIRST](variable.shape, dtype=variable.dtype))
    return value.detach()


def initialiser(entries: Iterable[Named]) -> Callable[[str, Tensor], None]:
    """Return what fills this rank's tensors, given their names."""
    by_name = {entry.name: entry for entry in entries}

    def fill(name: str, tensor: Tensor) -> None:
        entry = by_name[name]
        tensor.copy_(entry.view.apply(first_values(entry.variable)))

    return fill


def adopt(trainer: Trainer, model: Any, entries: Iterable[Named]) -> None:
    """Let Keras's variables of this rank's stage be the tensors that the trainer holds."""
    names = {}
    for entry in entries:
        local = trainer.store.tensors.get(entry.name)
        if local is None or not entry.variable.value.is_meta:
            continue
        if trainer.store.boxes[entry.name] == Box.whole(trainer.placement.shapes[entry.name]):
            value = entry.view.invert(local.detach(), tuple(entry.variable.shape))
            _give(entry.variable, value)
            names[id(entry.variable)] = entry.name
    for i, slot in slots(model.optimizer):
        if slot.value.is_meta and id(model.optimizer._trainable_variables[i]) in names:
            _give(slot, first_values(slot))


def check_callbacks(given: Iterable[Any]) -> None:
    """Refuse callbacks that read all weights at once."""
    for callback in given:
        restores = isinstance(callback, stock.EarlyStopping) and callback.restore_best_weights
        if restores or isinstance(callback, _NEED_ALL):
            raise ValueError(
                f"{type(callback).__name__} reads all weights, but this model was built weightless and each "
                "rank has its own stage only; call sw.keras.gather(model) after fit, then model.save(...)"
            )


def gather(model: Any) -> Any:
    """Give every rank all weights of a model that was built weightless and trained; return the model.

    Collective: every rank calls it. Afterwards the model is stock Keras.
    """
    distribution = vars(model).get("_shardwise")
    if distribution is None or distribution.steps is None or not is_weightless(model):
        return model
    steps = distribution.steps
    trainer, entries = steps.trainer, steps.module.variables
    whole = trainer.state_dict()
    rank, world = trainer.fabric.rank, trainer.fabric.world
    names = {id(entry.variable): entry.name for entry in entries}
    for entry in entries:
        if entry.variable.value.is_meta:
            found = whole.get(entry.name)
            shape = tuple(entry.variable.shape)
            value = first_values(entry.variable) if found is None else entry.view.invert(found, shape)
            _give(entry.variable, value.contiguous())
    for i, slot in slots(model.optimizer):
        name = names[id(model.optimizer._trainable_variables[i])]
        box = Box.whole(trainer.placement.shapes[name])
        if all(held == box for held in trainer.placement.parameters[name].values()):
            mine = trainer.placement.owner(name, box) == rank
            value = slot.value.detach().clone() if mine else torch.zeros(slot.shape, dtype=slot.value.dtype)
            world.all_reduce(value)
        else:
            value = first_values(slot)  # slices have an optimizer of their own
        _give(slot, value)
    for layer in model._flatten_layers():
        layer._track_variables()
    distribution.steps = None
    return model


def _give(variable: Any, value: Tensor) -> None:
    variable._value = nn.Parameter(value, requires_grad=variable.trainable and value.is_floating_point())
