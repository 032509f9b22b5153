"""A traced model before its shapes are known: steps in order, with references between them.

Both tracers (`trace_fx`, `trace_export`) make the same thing, so everything after them exists once.
A `Step` calls a plain function: modules of known kinds are already replaced by their functional form,
in-place calls by out-of-place ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.graph.layer import Source, TensorSpec


@dataclass(frozen=True, slots=True)
class Result:
    """Refer to the result of the step (or of the input) with this id."""

    id: str


@dataclass(frozen=True, slots=True)
class Weight:
    """Refer to a parameter, buffer or constant by its name in the model."""

    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """Call `target` with arguments in which `Result` and `Weight` stand for values.

    Args:
        id: unique among the steps; what `Result` refers to.
        target: a function, or a `ModuleTarget` for a module that stays opaque.
        label: the readable name that the layer should get.
        module: path of the module that this call is, or "".
        mutates: id of the value that the user's code overwrote here; readers were rewired to this step.
        guard: what the step must give, since the model's control flow was traced for it; None if any.
        state: for opaque modules, local name -> name in the model of each parameter and buffer.
    """

    id: str
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    module: str = ""
    where: str = ""
    reason: str = ""
    mutates: str = ""
    guard: Any = None
    state: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that the model holds: its spec, what it is and whether it is trained."""

    spec: TensorSpec
    origin: Source
    trained: bool = False


@dataclass(frozen=True)
class Trace:
    """A traced model: what `propagate` turns into a `Graph` for any input shapes.

    Args:
        inputs: id and name of every tensor input, in order of the arguments.
        specs: shape and dtype of the inputs that it was traced with.
        output: the returned structure, with `Result` and `Weight` leaves.
        refuse: says why the trace does not hold for other input shapes, or "" if it does.
        fakes: remembers the calls that were run without data during tracing.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    output: Any
    held: Mapping[str, Held]
    tied: Mapping[str, str]
    training: bool
    source: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)
    refuse: Callable[[Sequence[tuple[int, ...]]], str] | None = None
    notes: tuple[str, ...] = ()
    fakes: Any = None


def transform(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return `tree` with `leaf` applied to everything that is no tuple, list, dict or slice."""
    if isinstance(tree, tuple):
        items = [transform(v, leaf) for v in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*items)
        # torch's own named results (of sort, topk ...) are built from one sequence.
        return type(tree)(items) if type(tree).__module__ == "torch.return_types" else tuple(items)
    if isinstance(tree, list):
        return [transform(v, leaf) for v in tree]
    if isinstance(tree, dict):
        return {k: transform(v, leaf) for k, v in tree.items()}
    if isinstance(tree, slice):
        return slice(*(transform(v, leaf) for v in (tree.start, tree.stop, tree.step)))
    return leaf(tree)


def leaves(tree: Any) -> list[Any]:
    """Return everything in `tree` that is no tuple, list, dict or slice."""
    found: list[Any] = []
    transform(tree, found.append)
    return found
