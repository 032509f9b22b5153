"""The execution rules: for each operator, how one rank computes its box of the output.

A rule is a function `bind(op, rank) -> run`, called once when a program is bound. All arithmetic on boxes
happens there; `run(tensors)` gets the local tensors in operand order and returns the local output. The few
rules that need more than tensors (random masks, the user's own modules) are bound with `Surroundings` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwise.graph import Kind, Ref, Source
from shardwise.graph.layer import Device
from shardwise.program import Compute
from shardwise.runtime.rules.surroundings import Surroundings

Run = Callable[[Sequence[Any]], Tensor]
Bind = Callable[[Compute, int], Run]
PlacedBind = Callable[[Compute, int, Surroundings], Run]

OPAQUE = "opaque"
"""The rule of all layers of kind OTHER."""

_RULES: dict[str, PlacedBind] = {}


def rule(*ops: str) -> Callable[[Bind], Bind]:
    """Register a function as the rule of the given operators."""

    def register(bind: Bind) -> Bind:
        placed_rule(*ops)(lambda op, rank, surroundings: bind(op, rank))
        return bind

    return register


def placed_rule(*ops: str) -> Callable[[PlacedBind], PlacedBind]:
    """Register a rule that is bound with its surroundings."""

    def register(bind: PlacedBind) -> PlacedBind:
        for op in ops:
            if op in _RULES:
                raise ValueError(f"two execution rules for {op!r}")
            _RULES[op] = bind
        return bind

    return register


def bind(op: Compute, rank: int, surroundings: Surroundings | None = None) -> Run:
    """Return the function that computes this rank's part of a layer."""
    box = op.makes.layout.box(rank)
    if box.empty:
        shape, dtype = box.shape, getattr(torch, op.makes.spec.dtype)
        return lambda tensors: tensors[0].new_zeros(shape, dtype=dtype)
    surroundings = surroundings or Surroundings()
    weights = [i for i, o in enumerate(op.layer.operands) if o.origin is not Source.VALUE]
    slices = {i: part for i in weights if (part := crop(op, rank, i)) is not None}
    if slices:
        return _sliced(op, rank, surroundings, slices)
    found = _RULES.get(op.layer.op if op.layer.kind is not Kind.OTHER else OPAQUE)
    return generic(op, rank) if found is None else found(op, rank, surroundings)


def _sliced(
    op: Compute, rank: int, surroundings: Surroundings, slices: Mapping[int, tuple[slice, ...]]
) -> Run:
    """Give a layer its own part of weights of which another layer needs more."""
    reads = [
        replace(r, layout=w) if i in slices else r
        for i, (r, w) in enumerate(zip(op.reads, op.wants, strict=True))
    ]
    run = bind(replace(op, reads=tuple(reads)), rank, surroundings)
    return lambda tensors: run([t[slices[i]] if i in slices else t for i, t in enumerate(tensors)])


def crop(op: Compute, rank: int, index: int) -> tuple[slice, ...] | None:
    """Return the slices that pick what the output needs from what is held; None if that is all of it."""
    held, want = op.reads[index].stored(rank), op.wants[index].box(rank)
    return None if want == held else want.slices(held)


def cropped(op: Compute, rank: int) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function that crops every operand to what the output needs."""
    crops = [crop(op, rank, i) for i in range(len(op.reads))]
    if all(c is None for c in crops):
        return list
    return lambda tensors: [t if c is None else t[c] for t, c in zip(tensors, crops, strict=True)]


def generic(op: Compute, rank: int) -> Run:
    """Run the user's own call on the cropped operands: right wherever the call knows no sizes."""
    call = op.layer.call
    if call is None:
        raise ValueError(f"layer {op.layer.name!r} ({op.layer.op}) has neither a rule nor a call")
    pick = cropped(op, rank)
    target, args, kwargs = call.target, call.args, dict(call.kwargs)

    def run(tensors: Sequence[Any]) -> Tensor:
        local = pick(tensors)
        result: Tensor = target(*fill(args, local), **fill(kwargs, local))
        return result

    return run


def fill(template: Any, tensors: Sequence[Any]) -> Any:
    """Replace every `Ref` in the arguments of a call by its tensor."""
    if isinstance(template, Ref):
        return tensors[template.index]
    if isinstance(template, Device):
        return tensors[0].device
    if isinstance(template, (tuple, list)):
        return type(template)(fill(item, tensors) for item in template)
    if isinstance(template, Mapping):
        return {key: fill(item, tensors) for key, item in template.items()}
    return template
