"""Trace a model with `torch.fx`, keeping every module whole whose inside cannot be traced.

When the forward of some submodule cannot be traced, its class becomes a leaf and the trace starts again; the
model's own forward must be traceable. Control flow that depends only on sizes is followed for the sizes of
the example, and each decision is recorded as a guard.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwise.graph import canonical
from shardwise.graph.errors import CaptureError
from shardwise.graph.example import Example, spec_of
from shardwise.graph.layer import ModuleTarget, Source
from shardwise.graph.modules import functional_form, known
from shardwise.graph.trace import Held, Result, Step, Trace, Weight, transform

_INTERNAL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def user_line() -> str:
    """Return file and line of the innermost frame that belongs to the user's code."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_INTERNAL, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class LeafTracer(fx.Tracer):
    """Record a model's calls; modules of known kinds and those in `opaque` are not entered."""

    def __init__(self, example: Example, opaque: Mapping[type, str]) -> None:
        super().__init__()
        self.example = example
        self.opaque = opaque
        self.failed: nn.Module | None = None
        self.failed_at = ""
        self.constants: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}
        self.scopes: dict[str, str] = {}
        self.lines: dict[str, str] = {}

    def trace_model(self, model: nn.Module) -> fx.Graph:
        """Trace the call of `model` that the example describes."""
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            self.names.setdefault(id(tensor), name)
        return self.trace(model)

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
        # A parametrised module computes its weights first: those calls are layers of their own.
        return super().is_leaf_module(m, module_qualified_name) and "parametrizations" not in m._modules

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Remember the innermost module that could not be traced."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed is None:
                self.failed = m
            raise

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Note where in the user's code and in which module a node was made."""
        node = super().create_node(*args, **kwargs)
        self.scopes[node.name] = self.scope.module_path
        self.lines[node.name] = user_line()
        return node

    def create_arg(self, a: Any) -> Any:
        """Refer to tensors by their name in the model, or keep them as constants."""
        if isinstance(a, Tensor) and not isinstance(a, fx.Proxy):
            name = self.names.get(id(a))
            if name is None:
                name = f"_constant{len(self.constants)}"
                self.names[id(a)] = name
                self.constants[name] = a
            return self.create_node("get_attr", name, (), {})
        return super().create_arg(a)


def trace_fx(model: nn.Module, example: Example) -> Trace:
    """Trace `model` with torch.fx, making leaves of what cannot be traced inside."""
    opaque: dict[type, str] = {}
    while True:
        tracer = LeafTracer(example, opaque)
        try:
            graph = tracer.trace_model(model)
            break
        except Exception as error:
            where = error_line(error)
            if tracer.failed is None or type(tracer.failed) in opaque:
                raise CaptureError(_first_line(error), where) from error
            opaque[type(tracer.failed)] = f"{where}: {_first_line(error)}"
    return _Converter(model, tracer, opaque).convert(graph, example)


def error_line(error: BaseException) -> str:
    """Return file and line of the user's innermost frame in the traceback of `error`."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((*_INTERNAL, "<")):
            found = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


class _Converter:
    """Turn fx nodes into steps: functional modules, out-of-place calls, rewired readers."""

    def __init__(self, model: nn.Module, tracer: LeafTracer, opaque: Mapping[type, str]) -> None:
        self.model = model
        self.tracer = tracer
        self.opaque = opaque
        self.modules = dict(model.named_modules())
        self.current: dict[str, Any] = {}
        self.overwritten: dict[str, str] = {}
        self.used: dict[str, nn.Module] = {}
        self.steps: list[Step] = []

    def convert(self, graph: fx.Graph, example: Example) -> Trace:
        output: Any = None
        for node in graph.nodes:
            if node.op == "placeholder":
                self.current[node.name] = Result(node.target)
            elif node.op == "get_attr":
                self.current[node.name] = self._attribute(node.target)
            elif node.op == "output":
                output = self._resolve(node.args[0])
            else:
                self._call(node)
        held, tied = holdings(self.model, self.tracer.constants)
        return Trace(
            steps=tuple(self.steps),
            inputs=example.names,
            specs=example.specs,
            output=output,
            held=held,
            tied=tied,
            training=self.model.training,
            source="fx",
            constants=self.tracer.constants,
            modules=self.used,
        )

    def _attribute(self, name: str) -> Weight:
        if name not in self.tracer.constants:
            tensor = self.model
            for part in name.split("."):
                tensor = getattr(tensor, part)
            known_name = self.tracer.names.get(id(tensor))
            if known_name is None:
                self.tracer.constants[name] = tensor  # type: ignore[assignment]
            else:
                name = known_name
        return Weight(name)

    def _resolve(self, tree: Any) -> Any:
        return transform(tree, lambda a: self._newest(a) if isinstance(a, fx.Node) else a)

    def _newest(self, node: fx.Node) -> Result | Weight:
        value: Result | Weight = self.current[node.name]
        while isinstance(value, Result) and value.id in self.overwritten:
            value = Result(self.overwritten[value.id])
        return value

    def _call(self, node: fx.Node) -> None:
        args, kwargs = self._resolve(tuple(node.args)), self._resolve(dict(node.kwargs))
        where, scope = self.tracer.lines[node.name], self.tracer.scopes[node.name]
        # Placeholders are known by the names of the arguments; keep the ids of steps apart from them.
        common: dict[str, Any] = {"id": f"%{node.name}", "where": where}
        if node.op == "call_module":
            step = self._module(str(node.target), args, kwargs, common)
        else:
            target = canonical.method(str(node.target)) if node.op == "call_method" else node.target
            target, writes = canonical.out_of_place(target)
            if kwargs.get("inplace"):
                kwargs, writes = {**kwargs, "inplace": False}, True
            name = canonical.name_of(target) or getattr(target, "__name__", "function")
            label = f"{scope}.{name.strip('_')}" if scope else name.strip("_")
            mutates = args[0].id if writes and args and isinstance(args[0], Result) else ""
            step = Step(target=target, args=args, kwargs=kwargs, label=label, mutates=mutates, **common)
        self.steps.append(step)
        self.current[node.name] = Result(step.id)
        if step.mutates:
            self.overwritten[step.mutates] = step.id

    def _module(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], common: Any) -> Step:
        module = self.modules[path]
        common = {**common, "label": path, "module": path}
        if known(module):

            def weight(local: str) -> Weight | None:
                tensor = getattr(module, local)
                return None if tensor is None else Weight(self.tracer.names[id(tensor)])

            target, new_args, new_kwargs = functional_form(module, weight, args, kwargs)
            inplace = getattr(module, "inplace", False) and isinstance(args[0], Result)
            mutates = args[0].id if inplace else ""
            return Step(target=target, args=new_args, kwargs=new_kwargs, mutates=mutates, **common)
        self.used[path] = module
        reason = self.opaque.get(type(module), f"torch.nn.{type(module).__name__} has no rule of its own")
        state = {
            local: self.tracer.names[id(tensor)]
            for local, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        target = ModuleTarget(path)
        return Step(target=target, args=args, kwargs=kwargs, reason=reason, state=state, **common)


def holdings(model: nn.Module, constants: Mapping[str, Tensor]) -> tuple[dict[str, Held], dict[str, str]]:
    """Return everything a model holds by its first name, and the other names of tied parameters."""
    held: dict[str, Held] = {}
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
        else:
            held[name] = Held(spec_of(parameter), Source.PARAMETER, parameter.requires_grad)
    for name, buffer in (*model.named_buffers(), *constants.items()):
        held[name] = Held(spec_of(buffer), Source.BUFFER)
    return held, tied
