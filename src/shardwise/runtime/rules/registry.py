"""The execution rules: for each operator, how one rank computes its box of the output.

A rule is a function `bind(op, rank) -> run`, called once when a program is bound. All arithmetic on boxes
happens there; `run(tensors)` gets the local tensors in operand order and returns the local output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwise.graph import Ref
from shardwise.program import Compute

Run = Callable[[Sequence[Any]], Tensor]
Bind = Callable[[Compute, int], Run]

_RULES: dict[str, Bind] = {}


def rule(*ops: str) -> Callable[[Bind], Bind]:
    """Register a function as the rule of the given operators."""

    def register(bind: Bind) -> Bind:
        for op in ops:
            if op in _RULES:
                raise ValueError(f"two execution rules for {op!r}")
            _RULES[op] = bind
        return bind

    return register


def bind(op: Compute, rank: int) -> Run:
    """Return the function that computes this rank's part of a layer."""
    box = op.makes.layout.box(rank)
    if box.empty:
        shape = box.shape
        return lambda tensors: tensors[0].new_zeros(shape)
    return _RULES.get(op.layer.op, generic)(op, rank)


def crop(op: Compute, rank: int, index: int) -> tuple[slice, ...] | None:
    """Return the slices that pick what the output needs from what is held; None if that is all of it."""
    held, want = op.reads[index].layout.box(rank), op.wants[index].box(rank)
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
    if isinstance(template, (tuple, list)):
        return type(template)(fill(item, tensors) for item in template)
    if isinstance(template, Mapping):
        return {key: fill(item, tensors) for key, item in template.items()}
    return template
