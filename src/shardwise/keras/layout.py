"""Store kernels the way torch's convolutions read them, whatever the order of their dimensions in Keras.

Keras keeps kernels as (*k, in, out); torch wants (out, in, *k) and copies what lies otherwise in memory, in
both passes of every step. A variable that is stored in torch's order and seen in Keras's needs no copy, and
its values, shape and name are what they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardwise.graph.keras.variables import Named
from shardwise.graph.keras.views import AS_IS, View
from shardwise.keras.state import slots


def store_as_torch(model: Any, entries: Iterable[Named]) -> None:
    """Store a model's kernels, and what its optimizer keeps for each of them, in the order of torch."""
    views = {id(entry.variable): entry.view for entry in entries}
    optimizer = model.optimizer
    kept = slots(optimizer) if optimizer is not None and optimizer.built else ()
    followers = [(slot, optimizer._trainable_variables[i]) for i, slot in kept]
    with torch.no_grad():
        for entry in entries:
            _store(entry.variable.value, entry.view)
        for slot, variable in followers:
            if tuple(slot.shape) == tuple(variable.shape):
                _store(slot.value, views.get(id(variable), AS_IS))


def _store(tensor: Tensor, view: View) -> None:
    if view.dims and not tensor.is_meta:
        tensor.data = view.invert(view.apply(tensor.data).contiguous(), tuple(tensor.shape))
