"""Turn a task back into the callables that the runtime runs for it, on tensors of its local shapes."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.geometry import Box, Layout
from shardwise.graph import Call, Operand, Source
from shardwise.oracle.kernels import Task
from shardwise.program import Compute, Held, Normalise
from shardwise.runtime.rules import bind
from shardwise.runtime.shared_norm import bind_norm
from shardwise.runtime.wire import LoneWire, Wires

Forward = Callable[[Sequence[Tensor]], Any]
Backward = Callable[[Any, Tensor], None]


def portable(task: Task) -> Task | None:
    """Return the task in a form that can be sent to another process; None if it cannot run there.

    Some of torch's functions cannot be sent; that only matters for operators without an execution rule.
    """
    layer = task.layer
    call = layer.call
    if call is not None:
        call = Call(call.target, call.args, dict(call.kwargs))
        try:
            pickle.dumps(call)
        except (AttributeError, TypeError, pickle.PicklingError):
            call = None
    sent = dataclasses.replace(
        task, layer=dataclasses.replace(layer, attributes=dict(layer.attributes), call=call)
    )
    try:
        bound(sent)
    except (ValueError, KeyError):
        return None
    return sent


def bound(task: Task) -> tuple[Forward, Backward]:
    """Return forward and backward of a task as one rank executes them."""
    reads = tuple(_held(o, box) for o, box in zip(task.layer.operands, task.held, strict=True))
    wants = tuple(_layout(o.spec.shape, box) for o, box in zip(task.layer.operands, task.wants, strict=True))
    spec = task.layer.outputs[0]
    makes = Held(task.layer.name, task.layer.name, _layout(spec.shape, task.out), spec)
    if task.shared:
        return _shared(task, reads, wants, makes)
    run = bind(Compute(task.layer, reads, wants, makes), 0)

    def forward(tensors: Sequence[Tensor]) -> Tensor:
        return run(tensors)

    def backward(out: Any, gradient: Tensor) -> None:
        if out.requires_grad:
            torch.autograd.backward([out], [gradient])

    return forward, backward


def _shared(
    task: Task, reads: tuple[Held, ...], wants: tuple[Layout, ...], makes: Held
) -> tuple[Forward, Backward]:
    layer = task.layer
    op = Normalise(layer, reads, wants, makes, makes.layout, task.out.shape[0], "group")
    names = [o.source for o in layer.operands]

    # Built once per set of tensors, as the runtime does it; the wire is a group of one.
    made: dict[int, Any] = {}
    alone = Wires(LoneWire(), LoneWire(), LoneWire())

    def norm_of(tensors: Sequence[Tensor]) -> Any:
        key = id(tensors)
        if key not in made:
            made[key] = bind_norm(op, 0, alone, dict(zip(names, tensors, strict=True)))
        return made[key]

    def forward(tensors: Sequence[Tensor]) -> Any:
        norm = norm_of(tensors)
        with torch.no_grad():
            out, saved = norm.forward(tensors[0])
        return out, saved, norm

    def backward(result: Any, gradient: Tensor) -> None:
        _, saved, norm = result
        with torch.no_grad():
            norm.backward(saved, gradient)

    return forward, backward


def tensors_of(task: Task, device: torch.device, input_grad: bool) -> list[Tensor]:
    """Return fresh operands of a task's local shapes; parameters always want gradients."""
    result = []
    for operand, box in zip(task.layer.operands, task.held, strict=True):
        dtype = getattr(torch, operand.spec.dtype)
        if not dtype.is_floating_point:
            result.append(torch.zeros(box.shape, dtype=dtype, device=device))
            continue
        # Variances must be positive; for the rest any ordinary numbers do.
        tensor = torch.rand(box.shape, dtype=dtype, device=device) + 0.5
        if operand.origin is Source.PARAMETER:
            tensor = torch.nn.Parameter(tensor)
        elif operand.origin is Source.VALUE:
            tensor.requires_grad_(input_grad)
        result.append(tensor)
    return result


def _held(operand: Operand, box: Box) -> Held:
    return Held(operand.source, operand.source, _layout(operand.spec.shape, box), operand.spec)


def _layout(shape: Sequence[int], box: Box) -> Layout:
    return Layout(tuple(shape), (box,), (0,))
