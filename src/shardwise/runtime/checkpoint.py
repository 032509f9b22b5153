"""Save and load weights and optimizer with torch's distributed checkpoints: each rank its own slices.

A slice is stored under `<name> <box>`, so equal slices of several ranks are written once, and slices of one
parameter on different ranks do not collide.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardwise.plan import Plan, PlanError
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.placement import Placement
from shardwise.runtime.store import Store

_PLAN = "plan.toml"


def save_state(
    path: Path,
    store: Store,
    placement: Placement,
    fabric: Fabric,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan,
) -> None:
    """Write a folder with weights, optimizer and plan; collective over the world."""
    if fabric.rank == 0:
        path.mkdir(parents=True, exist_ok=True)
        plan.save(path / _PLAN)
    _settle(fabric, store)
    state = _weights(store) | _optimizer_tensors(store, optimizer) | _settings(fabric, optimizer)
    with _quiet():
        save(state, checkpoint_id=str(path), no_dist=not dist.is_initialized() or fabric.size == 1)
    _settle(fabric, store)


def load_state(
    path: Path,
    store: Store,
    placement: Placement,
    fabric: Fabric,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan,
) -> None:
    """Read such a folder into the tensors of this rank; collective over the world."""
    if not (path / _PLAN).is_file():
        raise FileNotFoundError(f"{path}: no {_PLAN} in it; expected a folder that Trainer.save wrote")
    saved = Plan.load(path / _PLAN)
    if saved != plan:
        raise PlanError(
            "plan", f"{path} was saved under {saved}, this trainer has {plan}", "use the same plan"
        )
    if optimizer is not None:
        _start(optimizer)
        _match(path, store, optimizer)
    state = _weights(store) | _optimizer_tensors(store, optimizer) | _settings(fabric, optimizer)
    with _quiet():
        load(state, checkpoint_id=str(path), no_dist=not dist.is_initialized() or fabric.size == 1)
    if optimizer is not None:
        for group, settings in zip(optimizer.param_groups, state[_settings_key(fabric)], strict=True):
            group.update(settings)
    _settle(fabric, store)


def _weights(store: Store) -> dict[str, Any]:
    return {f"{n} {store.boxes[n]}": t.detach() for n, t in store.tensors.items() if not store.boxes[n].empty}


def _optimizer_tensors(store: Store, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {}
    names = {id(p): name for name, p in store.parameters.items()}
    result: dict[str, Any] = {}
    for parameter, held in optimizer.state.items():
        name = names[id(parameter)]
        for key, value in held.items():
            if isinstance(value, Tensor):
                result[f"optimizer.{key} {name} {store.boxes[name]}"] = value
    return result


def _match(path: Path, store: Store, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer hold state for those parameters that had some when the folder was written.

    Before its first update a parameter has none: momentum then begins with the next gradient.
    """
    saved: dict[str, set[str]] = {}
    for entry in FileSystemReader(path).read_metadata().state_dict_metadata:
        if entry.startswith("optimizer."):
            key, _, slice_name = entry.removeprefix("optimizer.").partition(" ")
            saved.setdefault(slice_name, set()).add(key)
    for name, parameter in store.named_parameters():
        found = saved.get(f"{name} {store.boxes[name]}", set())
        held = {key for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}
        if not found:
            optimizer.state.pop(parameter, None)
        elif found != held:
            raise ValueError(
                f"optimizer: {path} has {', '.join(sorted(found))} of {name}, this trainer's optimizer has "
                f"{', '.join(sorted(held)) or 'no state'}; load it with the optimizer that it was saved with"
            )


def _settings_key(fabric: Fabric) -> str:
    return f"optimizer.groups {fabric.rank}"


def _settings(fabric: Fabric, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {_settings_key(fabric): groups}


def _start(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer make its state, by an update that changes nothing."""
    if all(parameter in optimizer.state for group in optimizer.param_groups for parameter in group["params"]):
        return
    kept: list[tuple[nn.Parameter, Tensor, Tensor | None]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kept.append((parameter, parameter.detach().clone(), parameter.grad))
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter, value, grad in kept:
            parameter.copy_(value)
            parameter.grad = grad


def _settle(fabric: Fabric, store: Store) -> None:
    """Wait for all ranks."""
    fabric.world.all_reduce(torch.zeros(1, device=store.device))


class _quiet(warnings.catch_warnings):
    """Silence what torch's checkpoints warn of although it is meant: plain tensors, one process."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered
