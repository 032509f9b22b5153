"""Bring the state of a Keras model to all ranks: from the first one, or each part from those that hold it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor

from shardwise.geometry import Box
from shardwise.graph.keras.variables import Named
from shardwise.runtime.wire import Wire
from shardwise.training.trainer import Trainer


def agree(world: Wire, rank: int, tensors: Iterable[Tensor]) -> None:
    """Give every rank the values of rank 0; collective."""
    with torch.no_grad():
        for tensor in tensors:
            whole = tensor.detach().clone() if rank == 0 else torch.zeros_like(tensor)
            world.all_reduce(whole)
            tensor.copy_(whole)


Versions = dict[int, tuple[int, int]]


def versions(tensors: Iterable[Tensor]) -> Versions:
    """Return what tells, for each place in memory, whether somebody writes there later."""
    return {tensor.data_ptr(): (tensor.numel(), tensor._version) for tensor in tensors}


def agree_on_changed(world: Wire, rank: int, tensors: Iterable[Tensor], known: Versions) -> None:
    """Give every rank rank 0's values where any rank wrote since `known`; collective."""
    given = list(tensors)
    now = [(tensor.numel(), tensor._version) for tensor in given]
    pairs = zip(given, now, strict=True)
    changed = torch.tensor([known.get(t.data_ptr()) != v for t, v in pairs], dtype=torch.int64)
    world.all_reduce(changed)
    agree(world, rank, (t for t, writers in zip(given, changed.tolist(), strict=True) if writers))


def agree_number(world: Wire, rank: int, value: float) -> float:
    """Return rank 0's number on every rank; collective."""
    number = torch.tensor(value if rank == 0 else 0.0, dtype=torch.float64)
    world.all_reduce(number)
    return float(number)


def agree_all(world: Wire, rank: int, wish: bool, value: float) -> tuple[bool, float]:
    """Return whether any rank wishes it, and rank 0's value; collective."""
    numbers = torch.tensor([float(wish), 0.0 if rank else value], dtype=torch.float64)
    world.all_reduce(numbers)
    return bool(numbers[0]), float(numbers[1])


def is_same(world: Wire, rank: int, words: Iterable[str]) -> bool:
    """Tell whether all ranks have the same words; collective."""
    own = float(zlib.crc32("\n".join(words).encode()))
    differ, _ = agree_all(world, rank, agree_number(world, rank, own) != own, 0.0)
    return not differ


def agree_random(world: Wire, rank: int) -> None:
    """Let every rank draw the random numbers of rank 0 from now on, for shuffling; collective.

    Keras shuffles arrays by torch, datasets of its own by Python; generators that augment may use NumPy.
    """
    state = torch.get_rng_state().to(torch.int64)
    version, numbers, _ = random.getstate()
    other: dict[str, Any] = np.random.get_state(legacy=False)
    python = torch.tensor(numbers, dtype=torch.int64)
    numpy = torch.tensor([other["state"]["pos"], *other["state"]["key"].tolist()], dtype=torch.int64)
    agree(world, rank, [state, python, numpy])
    torch.set_rng_state(state.to(torch.uint8))
    random.setstate((version, tuple(python.tolist()), None))
    position, *keys = numpy.tolist()
    np.random.set_state({**other, "state": {"key": np.array(keys, dtype=np.uint32), "pos": position}})


def state_tensors(model: Any) -> list[Tensor]:
    """Return everything that training changes: variables, and the optimizer's."""
    variables = [*model.variables]
    if model.optimizer is not None and model.optimizer.built:
        variables += model.optimizer.variables
    return [variable.value for variable in variables]


def slot_lists(optimizer: Any) -> dict[str, list[Any]]:
    """Return what the optimizer keeps for each trained variable, in their order, by its own names."""
    known = optimizer._trainable_variables
    lists = {name: value for name, value in vars(optimizer).items() if isinstance(value, list)}
    return {name: value for name, value in lists.items() if len(value) == len(known) and value is not known}


def slots(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """Yield the optimizer's own variables that belong to a trained one, with its number."""
    for value in slot_lists(optimizer).values():
        yield from ((i, slot) for i, slot in enumerate(value) if isinstance(slot, keras.Variable))


def whole_slot(trainer: Trainer, entry: Named, slot: Any, pieces: Mapping[int, Tensor]) -> Tensor:
    """Return one of the optimizer's variables, from the ranks that update it; collective.

    Args:
        trainer: what was trained.
        entry: the weight that it belongs to.
        slot: the optimizer's variable.
        pieces: this rank's slices of such variables, by their ids.
    """
    rank, placement = trainer.fabric.rank, trainer.placement
    shape, box = placement.shapes[entry.name], trainer.store.boxes.get(entry.name)
    speaks = box is not None and not box.empty and placement.owner(entry.name, box) == rank
    if all(held == Box.whole(shape) for held in placement.parameters[entry.name].values()):
        value = slot.value.detach().clone() if speaks else torch.zeros(slot.shape, dtype=slot.value.dtype)
        trainer.fabric.world.all_reduce(value)
        return value
    value = torch.zeros(shape, dtype=slot.value.dtype)
    if speaks and box is not None:
        value[box.slices()] = pieces[id(slot)].detach()
    trainer.fabric.world.all_reduce(value)
    return entry.view.invert(value, tuple(entry.variable.shape))


def spread(trainer: Trainer, model: Any, entries: Iterable[Named], pieces: Mapping[int, Tensor]) -> None:
    """Bring weights and the optimizer's variables from the ranks that trained them to all; collective."""
    size = trainer.fabric.size
    if size == 1 or model.optimizer is None:
        return
    by_id = {id(entry.variable): entry for entry in entries}
    placement = trainer.placement
    whole = {name: Box.whole(placement.shapes[name]) for name in placement.held}
    # What every rank trains is the same everywhere; averages may be each rank's own.
    known = {n for n, held in placement.parameters.items() if list(held.values()).count(whole[n]) == size}
    trainer.write_back([name for name in placement.held if name not in known])
    with torch.no_grad():
        for i, slot in slots(model.optimizer):
            entry = by_id.get(id(model.optimizer._trainable_variables[i]))
            if entry is None or entry.name not in placement.parameters or entry.name in known:
                continue
            if slot.value.numel():
                slot.value.copy_(whole_slot(trainer, entry, slot, pieces))
