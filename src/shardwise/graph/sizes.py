"""Traced values that may be used as numbers where they are sizes.

A plain `fx.Proxy` cannot decide an `if`. These ask their tracer for the number that a size has with the
example; the tracer records every such decision.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from unittest import mock

import torch
from torch import fx

from shardwise.graph.trace import leaves

_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "zeros")


class Decider(Protocol):
    """What a traced value needs of its tracer."""

    def decide(self, node: fx.Node, convert: Any) -> Any:
        """Return the number that `node` is, and record that the trace depends on it."""
        ...

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call."""
        ...


class SizeProxy(fx.Proxy):
    """A traced value that, if it is a size, may be used as a number: the decision becomes a guard."""

    tracer: Decider  # type: ignore[assignment]

    def __getattr__(self, k: str) -> SizeAttribute:  # type: ignore[override]
        return SizeAttribute(self, k)

    def __int__(self) -> int:
        return int(self.tracer.decide(self.node, int))

    def __index__(self) -> int:
        return int(self.tracer.decide(self.node, int))

    def __float__(self) -> float:
        return float(self.tracer.decide(self.node, float))

    def __len__(self) -> int:
        return int(self.tracer.decide(self.node, len))

    def __bool__(self) -> bool:
        return bool(self.tracer.decide(self.node, bool))

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])  # type: ignore[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __iadd__(self, other: Any) -> Any:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> Any:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> Any:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._in_place(operator.itruediv, other)

    def __ipow__(self, other: Any) -> Any:
        return self._in_place(operator.ipow, other)

    def _in_place(self, function: Callable[..., Any], other: Any) -> Any:
        """Record `x += y`, which overwrites a tensor that others may hold too, but not a number."""
        if is_number(self.node):
            function = getattr(operator, function.__name__[1:])
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    def __ceil__(self) -> Any:
        return self.tracer.create_proxy("call_function", math.ceil, (self,), {})

    def __floor__(self) -> Any:
        return self.tracer.create_proxy("call_function", math.floor, (self,), {})

    def __round__(self, *digits: int) -> Any:
        return self.tracer.create_proxy("call_function", round, (self, *digits), {})


class SizeAttribute(SizeProxy):
    """An attribute of a traced value: a method until it is known to be none."""

    def __init__(self, root: SizeProxy, attr: str) -> None:
        self.root = root
        self.attr = attr
        self.tracer = root.tracer
        self._node: fx.Node | None = None

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """Return the node of the attribute itself; a method call never asks for it."""
        if self._node is None:
            self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call of the method."""
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


_NUMBER_METHODS = ("size", "dim", "numel", "ndimension", "nelement", "item")
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "getitem", "ceil", "floor")


def is_number(node: Any) -> bool:
    """Tell from the trace whether a value is a size or computed from sizes, not a tensor."""
    if not isinstance(node, fx.Node):
        return isinstance(node, (int, float))
    if node.op == "call_method":
        return node.target in _NUMBER_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    name = getattr(node.target, "__name__", "")
    return name in (*_ARITHMETIC, "round") and all(
        is_number(a) for a in node.args[: 1 if name == "getitem" else 2]
    )


@contextlib.contextmanager
def traced_factories(tracer: Decider) -> Iterator[None]:
    """Record torch's factories as calls while tracing, where their sizes are traced values."""
    with contextlib.ExitStack() as stack:
        for name in _FACTORIES:
            original = getattr(torch, name)
            stack.enter_context(mock.patch.object(torch, name, _recorded(tracer, original)))
        yield


def _recorded(tracer: Decider, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves((args, kwargs))):
            return tracer.create_proxy("call_function", original, args, kwargs)
        return original(*args, **kwargs)

    return factory
