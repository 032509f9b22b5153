"""Walk Keras's own graph and write down torch functions: the trace of a Keras model.

node of the model ── a rule for its class ──> torch functions
        │ no rule
        ├── a model ──────────────> walked in its turn
        ├── a symbolic call works ─> the operations inside, walked in their turn
        └── else ─────────────────> one opaque call
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import torch
from keras.src.ops.function import Function

from shardwise.graph.errors import CaptureError, Opaque
from shardwise.graph.example import Example, spec_of
from shardwise.graph.functional import Method
from shardwise.graph.keras import layers as rules
from shardwise.graph.keras.flow import Flow, Scribe
from shardwise.graph.keras.module import KerasModule
from shardwise.graph.keras.opaque import KerasCall, Slot
from shardwise.graph.keras.registry import rule_of
from shardwise.graph.layer import Source
from shardwise.graph.lines import first_line
from shardwise.graph.trace import Held, Result, Trace, Weight

__all__ = ["rules", "walk"]


def walk(module: KerasModule, example: Example) -> Trace:
    """Return the trace of a Keras model for the behaviour that its module is set to."""
    scribe = Scribe(module)
    model = module.model
    flows = [
        Flow(Result(name), tuple(spec.shape), spec.dtype)
        for name, spec in zip(example.names, example.specs, strict=True)
    ]
    walker = _Walker(scribe)
    function = walker.function_of(model, flows)
    if function is None:
        raise CaptureError(
            f"Keras model {model.name!r} cannot be called on symbolic inputs: {walker.refusal}"
        )
    outputs = walker.run(function, flows, "")
    if isinstance(outputs, (list, tuple)) and len(outputs) == 1:
        outputs = outputs[0]  # as Keras returns it
    returned = keras.tree.map_structure(lambda flow: scribe.order(flow, moved=False).ref, outputs)
    held = {
        entry.name: Held(
            spec_of(entry.view.apply(entry.variable.value)),
            Source.PARAMETER if entry.name in module._parameters else Source.BUFFER,
            entry.name in module._parameters and entry.is_trained,
        )
        for entry in module.variables
    }
    held |= {name: Held(spec_of(tensor), Source.BUFFER) for name, tensor in scribe.constants.items()}
    return Trace(
        steps=tuple(scribe.steps),
        inputs=example.names,
        specs=example.specs,
        output=returned,
        held=held,
        tied={},
        training=module.training,
        source="keras",
        constants=scribe.constants,
    )


class _Walker:
    def __init__(self, scribe: Scribe) -> None:
        self.scribe = scribe
        self.refusal = ""

    def function_of(self, model: Any, flows: Sequence[Flow]) -> Any:
        """Return the graph inside of a model: its own, or that of a symbolic call; None if there is none."""
        if isinstance(model, keras.Sequential):
            model.build() if model._functional is None else None
            return model._functional
        if isinstance(model, Function):
            return model
        return self._symbolic(model, flows if len(flows) > 1 else flows[0], {})

    def _symbolic(self, layer: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call a layer on symbols and return the graph that comes out."""
        symbols: list[Any] = []

        def symbol(item: Any) -> Any:
            if isinstance(item, Flow):
                symbols.append(keras.Input(batch_shape=(None, *item.shape[1:]), dtype=item.dtype))
                return symbols[-1]
            return item

        positional = keras.tree.map_structure(symbol, args if isinstance(args, tuple) else (args,))
        named = keras.tree.map_structure(symbol, dict(kwargs))
        if "training" not in named and getattr(layer, "_call_has_training_arg", False):
            named["training"] = self.scribe.training
        try:
            outputs = layer.call(*positional, **named)
            function = Function(symbols, outputs)
        except Exception as error:  # whatever the user's code does with symbols, the layer then runs whole
            self.refusal = first_line(error)
            return None
        hidden = _hidden_variables(layer, function)
        if hidden:
            # What the layer computed from them is a constant in this graph, and would not be trained.
            self.refusal = f"its variables {hidden} are used outside of Keras's graph"
            return None
        return function

    def run(self, function: Any, flows: Sequence[Flow], prefix: str) -> Any:
        """Write the steps of a graph; return its outputs in Keras's structure."""
        values: dict[int, Any] = {id(x): flow for x, flow in zip(function._inputs, flows, strict=True)}
        depths = sorted(function._nodes_by_depth, reverse=True)
        is_model = isinstance(function, keras.Model)
        for node in (node for depth in depths for node in function._nodes_by_depth[depth]):
            if not node.operation or node.is_input or any(id(x) not in values for x in node.input_tensors):
                continue
            args, kwargs = node.arguments.fill_in(values)
            if is_model or kwargs.get("training", 0) is None:
                # A model tells its layers whether it is trained; what was true when it was made is forgotten.
                kwargs = {key: value for key, value in kwargs.items() if key != "training"}
            made = self._node(node.operation, args, kwargs, prefix)
            for tensor, flow in zip(node.outputs, keras.tree.flatten(made), strict=True):
                values[id(tensor)] = replace(flow, shape=tuple(tensor.shape), dtype=str(tensor.dtype))
        return keras.tree.map_structure(lambda x: values[id(x)], function._outputs_struct)

    def _node(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], prefix: str) -> Any:
        label = prefix + operation.name
        kwargs = {key: value for key, value in kwargs.items() if not (key == "mask" and value is None)}
        self.scribe.label = label
        args, kwargs = self._cast(operation, args, kwargs)
        if isinstance(operation, keras.Model):
            flows = [a for a in keras.tree.flatten((args, kwargs)) if isinstance(a, Flow)]
            function = self.function_of(operation, flows)
            if function is not None:
                return self.run(function, flows, f"{label}/")
        before, reason = len(self.scribe.steps), ""
        found = rule_of(operation)
        if found is not None:
            try:
                return found(self.scribe, operation, *args, **kwargs)
            except Opaque as refusal:
                del self.scribe.steps[before:]
                reason = str(refusal)
        if isinstance(operation, keras.layers.Layer) and found is None and not _stateful(operation):
            function = self._symbolic(operation, args, kwargs)
            if function is not None and len(function._nodes) > len(function._inputs):
                flows = [a for a in keras.tree.flatten((args, kwargs)) if isinstance(a, Flow)]
                return self.run(function, flows, f"{label}/")
            reason = reason or self.refusal
        return self._opaque(
            operation, args, kwargs, reason or f"no rule for Keras's {type(operation).__name__}"
        )

    def _cast(self, operation: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast floating-point inputs to what a layer computes in, as Keras does."""
        if not isinstance(operation, keras.layers.Layer) or not operation._convert_input_args:
            return args, kwargs

        def leaf(item: Any) -> Any:
            wanted = operation.input_dtype
            if not isinstance(item, Flow) or not operation.autocast or item.dtype == wanted:
                return item
            if "float" not in item.dtype or "float" not in wanted:
                return item
            dtype = getattr(torch, wanted)
            return replace(
                item.made(self.scribe.add(Method("to"), item.ref, dtype, part="cast")), dtype=wanted
            )

        return keras.tree.map_structure(leaf, args), keras.tree.map_structure(leaf, kwargs)

    def _opaque(self, operation: Any, args: Any, kwargs: Any, reason: str) -> Any:
        """Write one call of Keras's own code."""
        if getattr(operation, "_call_has_training_arg", False) and kwargs.get("training") is None:
            kwargs = {**kwargs, "training": self.scribe.training}
        flows: list[Flow] = []

        def slot(item: Any) -> Any:
            if isinstance(item, Flow):
                flows.append(self.scribe.order(item, moved=False))
                return Slot(len(flows) - 1)
            return item

        template = keras.tree.map_structure(slot, (tuple(args), dict(kwargs)))
        held = {id(v) for v in getattr(operation, "variables", ())}
        held |= {id(v) for v in keras.tree.flatten(template) if isinstance(v, keras.Variable)}
        entries = tuple(e for e in self.scribe.module.variables if id(e.variable) in held)
        target = KerasCall(operation, template[0], template[1], len(flows), entries)
        weights = [Weight(entry.name) for entry in entries]
        made = self.scribe.add(target, *(flow.ref for flow in flows), *weights, reason=reason)
        spec = operation.compute_output_spec(*self._symbols(args), **self._symbols(kwargs))
        flat = keras.tree.flatten(spec)
        if len(flat) == 1 and not isinstance(spec, (tuple, list, dict)):
            return Flow(made, tuple(spec.shape), str(spec.dtype))
        parts = [Result(self.scribe.add(_pick, made, i, part=str(i)).id) for i in range(len(flat))]
        return [Flow(ref, tuple(s.shape), str(s.dtype)) for ref, s in zip(parts, flat, strict=True)]

    def _symbols(self, tree: Any) -> Any:
        def leaf(item: Any) -> Any:
            return keras.KerasTensor(item.shape, dtype=item.dtype) if isinstance(item, Flow) else item

        return keras.tree.map_structure(leaf, tree)


def _hidden_variables(layer: Any, function: Any) -> list[str]:
    """Return the variables of a layer that its graph neither shows nor leaves to a layer inside."""
    shown: set[int] = set()
    for node in (node for nodes in function._nodes_by_depth.values() for node in nodes):
        if node.is_input:
            continue
        if isinstance(node.operation, keras.layers.Layer):
            shown.update(id(v) for v in node.operation.variables)
        arguments = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
        shown.update(id(a) for a in arguments if isinstance(a, keras.Variable))
    return [v.path for v in layer.variables if id(v) not in shown]


def _pick(nested: Any, index: int) -> Any:
    return keras.tree.flatten(nested)[index]


def _stateful(layer: Any) -> bool:
    """Tell whether a layer changes variables of its own when it is called: averages, seeds."""
    return bool(layer.non_trainable_variables) and any(
        not v.trainable
        and id(v) not in {id(w) for s in layer._flatten_layers() for w in s._trainable_variables}
        for v in layer.non_trainable_variables
    )
