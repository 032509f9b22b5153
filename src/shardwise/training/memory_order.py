"""Let all ranks store images and parameters in one order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.graph import Layer
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.flow import place_of
from shardwise.runtime.order import Order, memory_code, order_of
from shardwise.runtime.store import Store


def agreed_order(name: str, layers: Iterable[Layer], fabric: Fabric, device: torch.device) -> Order:
    """Return the order of images with a name, or what the first rank finds faster; collective."""

    def agree(value: float) -> float:
        vote = torch.tensor([value], dtype=torch.float64, device=device)
        fabric.world.all_reduce(vote)
        return float(vote)

    return order_of(name, layers, device, fabric.rank, agree)


def movable(store: Store, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what has memory of its own: nobody sees the same numbers by another tensor."""
    known = {id(t): t for t in (*state.values(), *store.tensors.values())}
    places = Counter(place_of(t) for t in known.values() if t.device.type != "meta")
    return {n: t for n, t in store.tensors.items() if places[place_of(t)] == 1 and _fills_its_memory(t)}


def _fills_its_memory(tensor: Tensor) -> bool:
    shared: bool = tensor.is_shared()  # type: ignore[no-untyped-call]
    return tensor.untyped_storage().nbytes() == tensor.nbytes and not shared


def store_alike(store: Store, fabric: Fabric, names: Sequence[str]) -> None:
    """Store parameters alike on all ranks, whose gradients are summed in the order of their memory.

    A rank may have loaded its weights in another way than the others; then all of them start anew, row by
    row. Collective.
    """
    votes = torch.zeros((3, len(names)), dtype=torch.float64, device=store.device)
    for i, name in enumerate(names):
        if name in store.parameters:
            code = float(memory_code(store.parameters[name]))
            votes[:, i] = torch.tensor([1.0, code, code * code], dtype=torch.float64)
    fabric.world.all_reduce(votes)
    holders, codes, squares = votes.tolist()
    for i, name in enumerate(names):
        if name in store.parameters and holders[i] * squares[i] != codes[i] ** 2:
            parameter = store.parameters[name]
            parameter.data = parameter.data.contiguous()
