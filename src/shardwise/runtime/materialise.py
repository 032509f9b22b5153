"""Give a model without data its first values: each rank only its own slices, the same under every plan.

A module is filled as a whole, by its own `reset_parameters`, with random numbers that start from the seed
and the module's path; then only this rank's box of each tensor is kept. So the most that exists at one time
is what this rank keeps, and one module more.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.geometry import Box
from shardwise.runtime.store import Store

Init = Callable[[str, Tensor], None]


def on_meta(model: nn.Module) -> bool:
    """Tell whether a model has shapes but no data."""
    return any(t.device.type == "meta" for t in (*model.parameters(), *model.buffers()))


def materialise(
    store: Store, model: nn.Module, boxes: Mapping[str, Box], seed: int, init: Init | None = None
) -> int:
    """Fill the store with this rank's boxes of a model on meta; return the peak of parameter bytes.

    Args:
        store: where they go.
        model: the model; it stays on meta.
        boxes: what this rank keeps.
        seed: what random numbers start from.
        init: fills a whole tensor in place, given its name; default: each module's `reset_parameters`.
    """
    by_module: dict[str, list[str]] = {}
    for name in boxes:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    peak = 0
    for path, names in by_module.items():
        whole = _filled(model.get_submodule(path), path, names, seed, store.device, init)
        size = sum(t.nbytes for t in whole.values() if isinstance(t, nn.Parameter))
        peak = max(peak, store.parameter_bytes + size)
        for name in names:
            tensor, box = whole[name], boxes[name]
            if box == Box.whole(tensor.shape):
                store.put(name, tensor, box)
            else:
                part = tensor.detach()[box.slices()].clone()
                trained = isinstance(tensor, nn.Parameter)
                store.put(name, nn.Parameter(part, tensor.requires_grad) if trained else part, box)
    return max(peak, store.parameter_bytes)


def _filled(
    module: nn.Module, path: str, names: list[str], seed: int, device: torch.device, init: Init | None
) -> dict[str, Tensor]:
    """Return a module's own tensors with their first values, by the names in the model."""
    own = copy.copy(module)
    # Only this module's own tensors are replaced, in a shallow copy: the user's model stays as it was.
    prefix = f"{path}." if path else ""
    # With `init` tensors are filled one by one, so others of the same module need not exist.
    keys = {*module._parameters, *module._buffers}
    keys = keys if init is None else {key for key in keys if f"{prefix}{key}" in names}
    own._parameters = {key: _empty(p, device) for key, p in module._parameters.items() if key in keys}
    own._buffers = {key: _empty(b, device) for key, b in module._buffers.items() if key in keys}
    held = {**own._parameters, **own._buffers}
    tensors = {f"{prefix}{key}": tensor for key, tensor in held.items() if tensor is not None}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        if init is None:
            reset = getattr(own, "reset_parameters", None)
            if reset is None:
                raise ValueError(
                    f"{names[0]!r} has no data, and its module {path or 'at the top'!r} "
                    f"({type(module).__name__}) has no reset_parameters(); "
                    "write that method, or give init=lambda name, tensor: ..."
                )
            torch.manual_seed(seed_of(seed, path))
            reset()
        else:
            for name in tensors:
                torch.manual_seed(seed_of(seed, name))
                init(name, tensors[name])
    return tensors


def _empty(tensor: Any, device: torch.device) -> Any:
    """Return a tensor like the given one that has memory, a parameter like a parameter."""
    if tensor is None:
        return None
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def seed_of(seed: int, name: str) -> int:
    """Return the seed of one name."""
    return (seed * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode())) % 2**63
