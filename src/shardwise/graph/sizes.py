"""Traced values that may be used as numbers where they are sizes.

A plain `fx.Proxy` cannot decide an `if`. These ask their tracer for the number that a size has with the
example; the tracer records every such decision.
"""

from __future__ import annotations

import contextlib
import functools
import math
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
