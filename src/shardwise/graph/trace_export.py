"""Trace a model with `torch.export`, for models that `torch.fx` cannot follow.

Export runs the model's Python code on tensors without data, so it follows more than fx does. Sizes stay
symbolic where the model allows it; where it does not, the trace says for which sizes it holds.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree

from shardwise.graph.canonical import name_of
from shardwise.graph.errors import CaptureError
from shardwise.graph.example import Example, dtype_of
from shardwise.graph.layer import DEVICE
from shardwise.graph.lines import error_line, first_line, text_line
from shardwise.graph.modules import known
from shardwise.graph.quiet import quiet
from shardwise.graph.steps import StepWriter, first_names, holdings
from shardwise.graph.trace import Result, Trace, Weight, transform

# What export inserts to check sizes at run time; the steps themselves find out here.
_CHECKS = {"_assert_scalar", "_assert_async", "_assert_tensor_metadata", "_check", "_assert"}
_CHECKS |= {"sym_constrain_range", "sym_constrain_range_for_size"}
# "The batch is not one": export assumes it, the functions do not need it.
_NOT_ONE = re.compile(r"size\(\)\[0\]\)? (!= 1|>= 2)|2 <= L\[[^=]*size\(\)\[0\]$")


def trace_export(model: nn.Module, example: Example) -> Trace:
    """Trace `model` with torch.export."""
    try:
        program = _export(model, example)
    except Exception as error:
        raise CaptureError(first_line(error), error_line(error)) from error
    return _Converter(model, example, program).convert()


def _export(model: nn.Module, example: Example) -> torch.export.ExportedProgram:
    # A size of one would be taken for a constant: trace with a batch of two where the model allows it.
    batches = {spec.shape[0] for spec in example.specs if spec.shape}
    if batches == {1}:
        try:
            return _export_shapes(model, example, [(2, *spec.shape[1:]) for spec in example.specs])
        except Exception as error:
            if not isinstance(error, (RuntimeError, ValueError, AssertionError)):
                raise
    return _export_shapes(model, example, [spec.shape for spec in example.specs])


def _export_shapes(
    model: nn.Module, example: Example, shapes: Sequence[tuple[int, ...]]
) -> torch.export.ExportedProgram:
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    tensors = {
        name: torch.empty(shape, dtype=dtype_of(spec), device=device)
        for name, shape, spec in zip(example.names, shapes, example.specs, strict=True)
    }
    free: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tensors.values():
        free[tensor] = dict.fromkeys(range(tensor.ndim), torch.export.Dim.AUTO)
    args, kwargs = example.fill(tensors)
    with quiet():
        return torch.export.export(model, args, kwargs, dynamic_shapes=free, strict=False)


class _Converter:
    """Turn the nodes of an exported program into steps."""

    def __init__(self, model: nn.Module, example: Example, program: torch.export.ExportedProgram) -> None:
        self.model = model
        self.example = example
        self.program = program
        self.modules = dict(model.named_modules())
        self.names = first_names(model)
        self.constants: dict[str, Tensor] = {}
        self.writer = StepWriter(model, self.names, {})
        self.values: dict[str, Any] = {}
        self.counters: dict[str, Weight] = {}

    def convert(self) -> Trace:
        self._inputs()
        output: Any = None
        for node in self.program.graph.nodes:
            if node.op == "output":
                spec = self.program.call_spec.out_spec
                output = _pytree.tree_unflatten(list(self._resolve(tuple(node.args[0]))), spec)
            elif node.op == "get_attr":
                self.constants[node.target] = getattr(self.program.graph_module, node.target)
                self.values[node.name] = Weight(node.target)
            elif node.op == "call_function":
                self._call(node)
        held, tied = holdings(self.model, self.constants)
        return Trace(
            steps=tuple(self.writer.steps),
            inputs=self.example.names,
            specs=self.example.specs,
            output=output,
            held=held,
            tied=tied,
            training=self.model.training,
            source="export",
            constants=self.constants,
            refuse=_conditions(self.model, self.example, self.program._guards_code),
        )

    def _inputs(self) -> None:
        names = iter(self.example.names)
        known_names = {**dict(self.model.named_parameters(remove_duplicate=False))}
        known_names |= dict(self.model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
        for spec in self.program.graph_signature.input_specs:
            if isinstance(spec.arg, ConstantArgument):
                self.values[spec.arg.name] = spec.arg.value
            elif spec.kind is InputKind.USER_INPUT:
                self.values[spec.arg.name] = Result(next(names))
            elif spec.target in known_names:
                self.values[spec.arg.name] = Weight(self.names[id(known_names[spec.target])])
            else:
                target = str(spec.target)
                self.constants[target] = self.program.constants[target]
                self.values[spec.arg.name] = Weight(target)

    def _resolve(self, tree: Any) -> Any:
        def leaf(item: Any) -> Any:
            if isinstance(item, fx.Node):
                return self.writer.newest(self.values[item.name])
            return DEVICE if isinstance(item, torch.device) else item

        return transform(tree, leaf)

    def _call(self, node: fx.Node) -> None:
        args, kwargs = self._resolve(tuple(node.args)), self._resolve(dict(node.kwargs))
        name = name_of(node.target)
        if name in _CHECKS:
            return
        if name == "add_" and isinstance(args[0], Weight) and args[0].name.endswith("num_batches_tracked"):
            # Batch norm counts its batches itself: see `functional.batch_norm`.
            self.counters[args[0].name.rpartition(".")[0]] = args[0]
            return
        if name == "aten.batch_norm" and isinstance(args[3], Weight):
            counter = self.counters.get(args[3].name.rpartition(".")[0])
            kwargs = {**kwargs, "num_batches_tracked": counter} if counter is not None else kwargs
        scope = self._scope(node)
        module = self.modules.get(scope)
        self.values[node.name] = self.writer.function(
            f"%{node.name}",
            node.target,
            args,
            kwargs,
            scope=scope,
            module=scope if module is not None and known(module) else "",
            where=text_line(node.meta.get("stack_trace") or ""),
        )

    def _scope(self, node: fx.Node) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        path = str(next(reversed(list(stack.values())), ("", ""))[0])
        return path if path in self.modules else ""


def _conditions(
    model: nn.Module, example: Example, guards: Sequence[str]
) -> Callable[[Sequence[tuple[int, ...]]], str]:
    """Return what says which of export's conditions on the sizes other shapes do not meet."""
    signature = inspect.signature(model.forward)

    def refuse(shapes: Sequence[tuple[int, ...]]) -> str:
        tensors = {n: torch.empty(s, device="meta") for n, s in zip(example.names, shapes, strict=True)}
        args, kwargs = example.fill(tensors)
        scope: Mapping[str, Any] = {"L": signature.bind(*args, **kwargs).arguments, "math": math}
        for guard in guards:
            if not _NOT_ONE.search(guard) and not eval(guard, {"torch": torch}, dict(scope)):
                return f"the capture holds only where {_readable(guard)}"
        return ""

    return refuse


def _readable(guard: str) -> str:
    return re.sub(r"L\['(\w+)'\]((?:\[[^]]*\])*)\.size\(\)\[(\d+)\]", r"\1\2.shape[\3]", guard)
