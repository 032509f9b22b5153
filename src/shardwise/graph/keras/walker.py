"""Enter a Keras model node by node.

node of the model ── a rule for its class ──> torch functions
        │ no rule
        ├── a model ──────────────> walked in its turn
        ├── a symbolic call works ─> the operations inside, walked in their turn
        └── else ─────────────────> one opaque call
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import keras
import torch
from keras.src.ops.function import Function

from shardwise.graph.errors import Opaque
from shardwise.graph.functional import Method
from shardwise.graph.keras import masks
from shardwise.graph.keras.flow import Flow, Scribe, flows_in
from shardwise.graph.keras.opaque import KerasCall, Slot, output_spec, specs_of_zeros
from shardwise.graph.keras.registry import rule_of
from shardwise.graph.keras.symbolic import Inside, called_on_symbols, is_stateful
from shardwise.graph.trace import Result, Weight


class Walker:
    """Write the steps of Keras graphs down, those inside of others too."""

    def __init__(self, scribe: Scribe) -> None:
        self.scribe = scribe
        self.refusal = ""

    def inside(self, model: Any, args: Any, kwargs: Mapping[str, Any]) -> Inside | None:
        """Return the graph inside of a model: its own, or that of a symbolic call; None if there is none."""
        if isinstance(model, keras.Sequential) and model._functional is None:
            model.build()
        function = model._functional if isinstance(model, keras.Sequential) else model
        if not isinstance(function, Function):
            return self._symbolic(model, args, kwargs)
        given = {key: value for key, value in kwargs.items() if key not in ("mask", "training")}
        return Inside(function, masks.attached(flows_in((args, given)), kwargs.get("mask")))

    def _symbolic(self, layer: Any, args: Any, kwargs: Mapping[str, Any]) -> Inside | None:
        found = called_on_symbols(layer, args, kwargs, self.scribe.training)
        if isinstance(found, str):
            self.refusal = found
            return None
        return found

    def run(self, inside: Inside, prefix: str) -> Any:
        """Write the steps of a graph; return its outputs in Keras's structure."""
        function = inside.function
        values: dict[int, Any] = {id(x): flow for x, flow in zip(function._inputs, inside.flows, strict=True)}
        depths = sorted(function._nodes_by_depth, reverse=True)
        is_model = isinstance(function, keras.Model)
        for node in (node for depth in depths for node in function._nodes_by_depth[depth]):
            if not node.operation or node.is_input or any(id(x) not in values for x in node.input_tensors):
                continue
            args, kwargs = node.arguments.fill_in(values)
            if is_model:
                # A model tells its layers whether it is trained; what was true when it was made is forgotten.
                kwargs = {key: value for key, value in kwargs.items() if key != "training"}
            made = keras.tree.flatten(self._node(node.operation, args, kwargs, prefix))
            for tensor, flow in zip(node.outputs, made, strict=True):
                known = replace(flow, shape=tuple(tensor.shape), dtype=str(tensor.dtype))
                values[id(tensor)] = masks.unmasked(known) if masks.explicit(tensor) is not None else known

        def leave(symbol: Any) -> Flow:
            flow: Flow = values[id(symbol)]
            mask = masks.explicit(symbol) if prefix else None
            if mask is None:
                return flow
            # Outside of this graph the mask is not in sight, but the tensor carries it.
            if id(mask) not in values:
                values[id(mask)] = self.run(Inside(Function(function._inputs, mask), inside.flows), prefix)
            return replace(flow, mask=values[id(mask)])

        return keras.tree.map_structure(leave, function._outputs_struct)

    def _node(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], prefix: str) -> Any:
        if not isinstance(operation, keras.layers.Layer):
            return self._call(operation, args, kwargs, prefix)
        kwargs = masks.filled_in(operation, args, kwargs)
        made = self._call(operation, args, kwargs, prefix)
        found = masks.passed_on(operation, args, kwargs, self._run_mask)
        if found is None or isinstance(operation, keras.Model):
            return made
        return [replace(flow, mask=mask) for flow, mask in zip_longest(keras.tree.flatten(made), found)]

    def _run_mask(self, inside: Inside) -> list[Flow]:
        """Write the steps that compute the masks of the last layer's outputs."""
        self.scribe.label += ".mask"
        return list(keras.tree.flatten(self.run(inside, f"{self.scribe.label}/")))

    def _call(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], prefix: str) -> Any:
        label = self.scribe.label = prefix + operation.name
        kwargs = {key: value for key, value in kwargs.items() if not (key == "mask" and value is None)}
        args, kwargs = self._cast(operation, args, kwargs)
        if not isinstance(operation, keras.layers.Layer):
            return self._entered(operation, args, kwargs, label)
        told = kwargs.get("training")
        kwargs = {key: value for key, value in kwargs.items() if key != "training"}
        with self.scribe.told(told):
            return self._entered(operation, args, kwargs, label)

    def _entered(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], label: str) -> Any:
        if isinstance(operation, keras.Model):
            inside = self.inside(operation, args, kwargs)
            if inside is not None:
                return self.run(inside, f"{label}/")
        before, reason = self.scribe.mark(), ""
        found = rule_of(operation)
        if found is not None:
            try:
                if flows_in(kwargs.get("mask")) and not masks.reads_masks(found):
                    raise Opaque("it reads a mask")
                return found(self.scribe, operation, *args, **kwargs)
            except Opaque as refusal:
                self.scribe.undo(before)
                reason = str(refusal)
        if isinstance(operation, keras.layers.Layer) and found is None and not is_stateful(operation):
            inside = self._symbolic(operation, args, kwargs)
            if inside is not None and len(inside.function._nodes) > len(inside.function._inputs):
                return self.run(inside, f"{label}/")
            reason = reason or self.refusal
        return self.whole(
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
                item, ref=self.scribe.add(Method("to"), item.ref, dtype, part="cast"), dtype=wanted
            )

        return keras.tree.map_structure(leaf, args), keras.tree.map_structure(leaf, kwargs)

    def whole(self, operation: Any, args: Any, kwargs: Any, reason: str, *, decides: bool = False) -> Any:
        """Write one call of Keras's own code; tell whether the code decides by its data."""
        if isinstance(operation, keras.layers.Layer):
            # Those that do not ask hand it on to the layers inside.
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
        target = KerasCall(operation, template[0], template[1], len(flows), entries, decides)
        weights = [Weight(entry.name) for entry in entries]
        made = self.scribe.add(target, *(flow.ref for flow in flows), *weights, reason=reason)
        given = self._symbols(args), self._symbols(kwargs)
        spec = (specs_of_zeros if decides else output_spec)(operation, *given)
        flat = keras.tree.flatten(spec)
        if len(flat) == 1 and not isinstance(spec, (tuple, list, dict)):
            return Flow(made, tuple(spec.shape), str(spec.dtype))
        parts = [Result(self.scribe.add(_pick, made, i, part=str(i)).id) for i in range(len(flat))]
        return [Flow(ref, tuple(s.shape), str(s.dtype)) for ref, s in zip(parts, flat, strict=True)]

    def _symbols(self, tree: Any) -> Any:
        def leaf(item: Any) -> Any:
            return keras.KerasTensor(item.shape, dtype=item.dtype) if isinstance(item, Flow) else item

        return keras.tree.map_structure(leaf, tree)


def _pick(nested: Any, index: int) -> Any:
    return keras.tree.flatten(nested)[index]
