"""Trace a model with `torch.fx`, keeping every module whole whose inside cannot be traced.

When the forward of some submodule cannot be traced, its class becomes a leaf and the trace starts again; the
model's own forward must be traceable. Control flow that depends only on sizes is followed for the sizes of
the example, and each decision is recorded as a guard that other sizes must meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch import Tensor, fx, nn
from torch.nn import functional as F

from shardwise.graph import canonical
from shardwise.graph.errors import CaptureError, DataControlFlow
from shardwise.graph.example import Example
from shardwise.graph.fake import Fakes, Value
from shardwise.graph.lines import current_line, error_line, first_line
from shardwise.graph.modules import known
from shardwise.graph.propagate import Propagation
from shardwise.graph.sizes import SizeProxy, traced_factories
from shardwise.graph.steps import StepWriter, first_names, holdings
from shardwise.graph.trace import Result, Trace, Weight, transform


class LeafTracer(fx.Tracer):
    """Record a model's calls as steps; known modules and those in `opaque` are not entered."""

    def __init__(self, model: nn.Module, example: Example, opaque: Mapping[type, str]) -> None:
        super().__init__()
        self.model = model
        self.example = example
        self.opaque = opaque
        self.failed: nn.Module | None = None
        self.constants: dict[str, Tensor] = {}
        self.names = first_names(model)
        self.own = frozenset(self.names.values())
        self.writer = StepWriter(model, self.names, opaque)
        self.fakes = Fakes(self.writer.used)
        self.values: dict[str, Any] = {}
        self.output: Any = None
        self._sizes: Propagation | None = None

    def finish(self) -> Trace:
        """Trace the call that the example describes."""
        with traced_factories(self), mock.patch.object(F, "l1_loss", _l1_loss):
            self.trace(self.model)
        held, tied = holdings(self.model, self.constants)
        return Trace(
            steps=tuple(self.writer.steps),
            inputs=self.example.names,
            specs=self.example.specs,
            output=self.output,
            held=held,
            tied=tied,
            training=self.model.training,
            source="fx",
            constants=self.constants,
            modules=self.writer.used,
            fakes=self.fakes,
        )

    def decide(self, node: fx.Node, convert: Any) -> Any:
        """Return the number that `node` is for the example's sizes, and record it as a guard."""
        if self._sizes is None:
            self._sizes = Propagation(self.example.names, self.example.specs, self.fakes)
        self._sizes.hold(holdings(self.model, self.constants)[0])
        with _plain_modules():
            self._sizes.follow(self.writer.steps)
        found = self._sizes.resolve(self._value(node))
        if isinstance(found, Value) and convert is not len:
            raise DataControlFlow
        decided = found.shape[0] if isinstance(found, Value) else convert(found)
        self.writer.guard(
            f"%guard{len(self.writer.steps)}", convert, self._value(node), decided, current_line()
        )
        return decided

    def proxy(self, node: fx.Node) -> SizeProxy:
        """Make the traced values that can stand for numbers."""
        return SizeProxy(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        """Make one placeholder per tensor of the example, whatever the structure of the arguments."""
        proxies = {name: self.create_proxy("placeholder", name, (), {}) for name in self.example.names}
        args, kwargs = self.example.fill(proxies)

        def call(root: nn.Module) -> Any:
            return root.forward(*args, **kwargs)

        return call, [self.root]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Enter everything but modules of known kinds, torch's own and those that failed before."""
        if known(m) or type(m) in self.opaque:
            return True
        # Parametrised modules compute their weights first, hooked ones call more: enter those.
        more = "parametrizations" in m._modules or m._forward_hooks or m._forward_pre_hooks
        return super().is_leaf_module(m, module_qualified_name) and not more

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Remember the innermost module that could not be traced."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed is None:
                self.failed = m
            raise

    def create_arg(self, a: Any) -> Any:
        """Refer to tensors by their name in the model, or keep them as constants."""
        if isinstance(a, Tensor) and not isinstance(a, fx.Proxy):
            if id(a) not in self.names:
                self.names[id(a)] = f"_constant{len(self.constants)}"
                self.constants[self.names[id(a)]] = a
            return self.create_node("get_attr", self.names[id(a)], (), {})
        return super().create_arg(a)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any
    ) -> fx.Node:
        """Write the step of every node as soon as it is made."""
        if target is _l1_loss:
            target = _L1_LOSS
        node = super().create_node(kind, target, args, kwargs, *more, **named)
        resolved, settings = self._resolve(tuple(node.args)), self._resolve(dict(node.kwargs))
        key, where = f"%{node.name}", current_line()
        if kind == "placeholder":
            self.values[node.name] = Result(target)
        elif kind == "get_attr":
            self.values[node.name] = Weight(self._attribute(target))
        elif kind == "output":
            self.output = resolved[0]
        elif kind == "call_module":
            self.values[node.name] = self.writer.call_module(key, target, resolved, settings, where=where)
        else:
            function = canonical.method(target) if kind == "call_method" else target
            self.values[node.name] = self.writer.function(
                key, function, resolved, settings, scope=self.scope.module_path, where=where
            )
        return node

    def _attribute(self, path: str) -> str:
        if path in self.own or path in self.constants:
            return path
        tensor: Any = self.model
        for part in path.split("."):
            tensor = getattr(tensor, part)
        if id(tensor) not in self.names:
            self.names[id(tensor)] = path
            self.constants[path] = tensor
        return self.names[id(tensor)]

    def _value(self, node: fx.Node) -> Any:
        return self.writer.newest(self.values[node.name])

    def _resolve(self, tree: Any) -> Any:
        return transform(tree, lambda a: self._value(a) if isinstance(a, fx.Node) else a)


_L1_LOSS = F.l1_loss


def _l1_loss(*args: Any, **named: Any) -> Any:
    """Take the place of `l1_loss`, which hides its weights from a trace."""
    if any(isinstance(value, fx.Proxy) for value in (*args, *named.values())):
        return fx.Proxy.__torch_function__(_L1_LOSS, (fx.Proxy,), args, named)
    return _L1_LOSS(*args, **named)


_CALL, _GETATTR = nn.Module.__call__, nn.Module.__getattr__


@contextlib.contextmanager
def _plain_modules() -> Iterator[None]:
    """Let modules run as usual for a moment, although a trace is under way."""
    with (
        mock.patch.object(nn.Module, "__call__", _CALL),
        mock.patch.object(nn.Module, "__getattr__", _GETATTR),
    ):
        yield


def trace_fx(model: nn.Module, example: Example) -> Trace:
    """Trace `model` with torch.fx, making leaves of what cannot be traced inside."""
    opaque: dict[type, str] = {}
    while True:
        tracer = LeafTracer(model, example, opaque)
        try:
            return tracer.finish()
        except Exception as error:
            where = error_line(error)
            if tracer.failed is None or type(tracer.failed) in opaque:
                raise CaptureError(first_line(error), where) from error
            opaque[type(tracer.failed)] = f"{where}: {first_line(error)}"
