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
from torch import Tensor

from shardwise.geometry import Box
from shardwise.graph.keras.variables import Named
from shardwise.keras.first import Given, empty, first_values, forget, give, maker_of
from shardwise.keras.state import agree, slots, whole_slot
from shardwise.runtime.wire import Wire
from shardwise.training.trainer import Trainer

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
        empty(variable, initializer)

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
    makers = [maker_of(v) for v in variables]
    random = [maker for maker in makers if isinstance(getattr(maker, "seed", None), int)]
    seeds = torch.tensor([maker.seed for maker in random], dtype=torch.int64)
    agree(world, rank, [seeds])
    for maker, seed in zip(random, seeds.tolist(), strict=True):
        maker.seed = seed


def check_given(world: Wire, size: int, variables: Iterable[Any]) -> None:
    """Refuse weights that only some ranks were given: the others would draw theirs; collective."""
    # A rank that has a variable took its values at once; it cannot tell, and need not.
    known = list(variables)
    flags = [(not v.value.is_meta, isinstance(maker_of(v), Given)) for v in known]
    counts = torch.tensor(flags, dtype=torch.int64).reshape(len(known), 2)
    world.all_reduce(counts)
    for variable, (held, given) in zip(known, counts.tolist(), strict=True):
        if given and held + given != size:
            raise ValueError(
                f"variable {variable.path!r} was given values on {given} of {size - held} ranks: let every "
                "rank call load_weights, or none"
            )


def initialiser(entries: Iterable[Named], previous: Trainer | None) -> Callable[[str, Tensor], None]:
    """Return what fills this rank's tensors, given their names; slices are those of the trainer before."""
    by_name = {entry.name: entry for entry in entries}

    def fill(name: str, tensor: Tensor) -> None:
        entry = by_name[name]
        if maker_of(entry.variable) is None and previous is not None and name in previous.store.tensors:
            # The plan and its cuts are the same, so no more than this slice is kept of it.
            tensor.zero_()[previous.store.boxes[name].slices()] = previous.store.tensors[name].detach()
        else:
            tensor.copy_(entry.view.apply(first_values(entry.variable)))

    return fill


def take_given(trainer: Trainer, entries: Iterable[Named]) -> None:
    """Put values that were assigned since into the slices of a trainer; other ranks have the rest."""
    with torch.no_grad():
        for entry in entries:
            maker = maker_of(entry.variable)
            if not isinstance(maker, Given) or entry.name not in trainer.placement.held:
                continue
            box = trainer.store.boxes.get(entry.name)
            if box is not None:
                trainer.store.tensors[entry.name].copy_(entry.view.apply(maker.value)[box.slices()])
            forget(entry.variable)


def adopt(trainer: Trainer, model: Any, entries: Iterable[Named]) -> None:
    """Let Keras's variables of this rank's stage be the tensors that the trainer holds."""
    whole = set()
    for entry in entries:
        local = trainer.store.tensors.get(entry.name)
        if local is None or trainer.store.boxes[entry.name] != Box.whole(
            trainer.placement.shapes[entry.name]
        ):
            continue
        if entry.variable.value.is_meta:
            give(entry.variable, entry.view.invert(local.detach(), tuple(entry.variable.shape)))
        whole.add(id(entry.variable))
    for i, slot in slots(model.optimizer):
        if slot.value.is_meta and id(model.optimizer._trainable_variables[i]) in whole:
            give(slot, first_values(slot))


def settle(trainer: Trainer, model: Any, entries: Iterable[Named]) -> None:
    """Forget first values: from now on the ranks of the trainer have what there is."""
    held = {id(entry.variable) for entry in entries if entry.name in trainer.placement.held}
    for entry in entries:
        if id(entry.variable) in held:
            forget(entry.variable)
    for i, slot in slots(model.optimizer):
        if id(model.optimizer._trainable_variables[i]) in held:
            forget(slot)


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
    by_id = {id(entry.variable): entry for entry in entries}
    # The optimizer's first: they ask who has which slice of a weight.
    kept = [(slot, by_id[id(model.optimizer._trainable_variables[i])]) for i, slot in slots(model.optimizer)]
    for slot, entry in kept:
        if entry.name in trainer.placement.parameters:
            give(slot, whole_slot(trainer, entry, slot, steps.optimizer.pieces).contiguous())
        elif slot.value.is_meta:
            give(slot, first_values(slot))
    for entry in entries:
        if entry.variable.value.is_meta:
            found = whole.get(entry.name)
            shape = tuple(entry.variable.shape)
            value = first_values(entry.variable) if found is None else entry.view.invert(found, shape)
            give(entry.variable, value.contiguous())
    for layer in model._flatten_layers():
        layer._track_variables()
    distribution.steps = None
    return model
