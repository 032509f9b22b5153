"""Turn a trace into the graph for given input shapes, without computing anything.

Every step is run on tensors without data and described by its rule. Sizes are plain numbers here: what
the user's code computes from them is computed again for every set of shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from shardwise.geometry.access import Access, opaque, same
from shardwise.graph import functional
from shardwise.graph.canonical import name_of
from shardwise.graph.errors import CaptureError, Opaque
from shardwise.graph.fake import Fakes, Ran, Value, distinct
from shardwise.graph.graph import Graph, Shapes
from shardwise.graph.layer import Kind, Layer, Literal, ModuleTarget, Source, TensorSpec
from shardwise.graph.normalise import apply_rule, has_rule
from shardwise.graph.site import Site, module_state, value_of
from shardwise.graph.trace import Result, Step, Trace, Weight, transform


def propagate(trace: Trace, shapes: Shapes, fakes: Fakes | None = None) -> Graph:
    """Return the graph of a traced model for these input shapes."""
    _check_fixed(trace, shapes)
    return _Propagation(trace, shapes, fakes or Fakes(trace.modules)).graph()


def _check_fixed(trace: Trace, shapes: Shapes) -> None:
    for i, d in sorted(trace.fixed):
        if shapes[i][d] != trace.specs[i].shape[d]:
            raise CaptureError(
                f"the capture holds only for size {trace.specs[i].shape[d]} of dimension {d} of input "
                f"{trace.inputs[i]!r}, not for {shapes[i][d]}: capture the model again with an example of "
                "that size"
            )


class _Names:
    """Make names unique: the second use of a name gets `#2`."""

    def __init__(self) -> None:
        self.uses: dict[str, int] = {}

    def __call__(self, wanted: str) -> str:
        for n in itertools.count(self.uses.get(wanted, 0) + 1):
            name = wanted if n == 1 else f"{wanted}#{n}"
            if name == wanted or name not in self.uses:
                self.uses[wanted] = n
                self.uses.setdefault(name, 1)
                return name
        raise AssertionError("unreachable")


class _Propagation:
    def __init__(self, trace: Trace, shapes: Shapes, fakes: Fakes) -> None:
        self.trace = trace
        self.shapes = shapes
        self.fakes = fakes
        self.names = _Names()
        self.layers: list[Layer] = []
        self.results: dict[str, Any] = {}
        self.held = {
            name: Value(name, held.origin, held.spec, _contiguous(held.spec.shape), held.trained, name)
            for name, held in trace.held.items()
        }

    def graph(self) -> Graph:
        trace = self.trace
        for i, (name, spec, shape) in enumerate(zip(trace.inputs, trace.specs, self.shapes, strict=True)):
            self._input(i, name, TensorSpec(tuple(shape), spec.dtype))
        for step in trace.steps:
            self.results[step.id] = self._step(step)
        outputs = transform(self._resolve(trace.output), self._output)
        layers = _alive(self.layers, outputs)
        parameters = {n: h.spec for n, h in trace.held.items() if h.origin is Source.PARAMETER}
        return Graph(
            layers=layers,
            outputs=outputs,
            parameters=MappingProxyType(parameters),
            buffers=MappingProxyType({n: h.spec for n, h in trace.held.items() if h.origin is Source.BUFFER}),
            training=trace.training,
            tied=MappingProxyType(dict(trace.tied)),
            frozen=frozenset(n for n in parameters if not trace.held[n].trained),
            source=trace.source,
            constants=MappingProxyType(dict(trace.constants)),
            notes=trace.notes,
        )

    def _input(self, index: int, name: str, spec: TensorSpec) -> None:
        unique = self.names(name)
        self.layers.append(
            Layer(unique, Kind.INPUT, "input", outputs=(spec,), attributes=MappingProxyType({"index": index}))
        )
        stride = _contiguous(spec.shape)
        self.results[name] = Value(unique, Source.VALUE, spec, stride, False, unique)

    def _resolve(self, tree: Any) -> Any:
        def leaf(item: Any) -> Any:
            if isinstance(item, Result):
                return self.results[item.id]
            return self.held[item.name] if isinstance(item, Weight) else item

        return transform(tree, leaf)

    def _step(self, step: Step) -> Any:
        args, kwargs = self._resolve(step.args), self._resolve(dict(step.kwargs))
        site = Site(step, self.fakes, self.layers, self.names)
        name = name_of(step.target) if not isinstance(step.target, ModuleTarget) else ""
        before = len(self.layers)
        try:
            if step.guard is not None:
                return self._guard(step, args)
            if has_rule(name):
                try:
                    return apply_rule(name, site, args, kwargs)
                except Opaque as reason:
                    del self.layers[before:]
                    return self._opaque(site, args, kwargs, str(reason))
            return self._opaque(site, args, kwargs, step.reason or _why(step, name))
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{step.label or step.target}: {type(error).__name__}: {error}", step.where
            ) from error

    def _guard(self, step: Step, args: tuple[Any, ...]) -> Any:
        (found,) = args
        if found != step.guard:
            raise CaptureError(
                f"the model decides by a size here: the capture is for {step.guard!r}, these shapes give "
                f"{found!r}. Capture the model again with an example of this size",
                step.where,
            )
        return found

    def _opaque(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str) -> Any:
        """Describe a call of which nothing is known: it reads everything and runs whole."""
        step = site.step
        state = module_state(step, self.held)
        ran = self.fakes.run(step.target, args, kwargs, state)
        if not ran.made:
            return ran.result
        values = list(distinct((args, kwargs)))
        weights = [value for _, value in state if all(value is not v for v in values)]
        reads = [(f"input{i}", v, opaque(v.ndim)) for i, v in enumerate(values)]
        reads += [(local, value, opaque(value.ndim)) for local, value in state if value in weights]
        forward = self.fakes.flops(step.target, args, kwargs, state)
        is_module = isinstance(step.target, ModuleTarget)
        attributes: dict[str, Any] = {"state": tuple(local for local, _ in state)} if is_module else {}
        value = site.add(
            ran,
            (step.target, args, kwargs),
            kind=Kind.OTHER,
            op="module" if is_module else (name_of(step.target).strip("_") or "function"),
            reads=reads,
            attributes=attributes,
            flops=(forward, 2 * forward * any(made.trained for made in ran.made)),
            reason=reason,
        )
        return self._spread(site, ran, value)

    def _spread(self, site: Site, ran: Ran, value: Value) -> Any:
        """Give each tensor of a nested result a layer of its own; a single tensor is the layer itself."""
        from shardwise.graph.fake import Made

        if isinstance(ran.result, Made):
            return value
        if len(ran.made) == 1:
            return transform(ran.result, partial(_only, value=value)) if _nested(ran) else value
        numbers = itertools.count()

        def leaf(item: Any) -> Any:
            if not isinstance(item, Made):
                return item
            i = next(numbers)
            whole = Value(value.name, Source.VALUE, item.spec, item.stride, item.trained, value.name)
            picked = self.fakes.run(functional.identity, (whole,), {})
            access: Access = same(len(item.shape))
            part = site.add(
                picked,
                (functional.pick, (whole, i), {}),
                kind=Kind.OTHER,
                op="getitem",
                reads=[("input0", whole, access)],
                attributes={"index": i},
                suffix=f".{i}",
                reason="part of an opaque layer's result",
            )
            return value_of(item, part.name, ran) if item.alias is not None else part

        return transform(ran.result, leaf)

    def _output(self, item: Any) -> Any:
        """Name the layers among the outputs; a returned parameter becomes a layer, a string a literal."""
        if isinstance(item, str):
            return Literal(item)
        if not isinstance(item, Value):
            return item
        if item.origin is Source.VALUE:
            return item.name
        step = Step("", functional.identity, label=f"{item.name}.output")
        site = Site(step, self.fakes, self.layers, self.names)
        reads = [("input", item, same(item.ndim))]
        made = site.emit(functional.identity, (item,), {}, kind=Kind.ELEMENTWISE, op="identity", reads=reads)
        return made.name


def _only(item: Any, value: Value) -> Any:
    from shardwise.graph.fake import Made

    return value if isinstance(item, Made) else item


def _nested(ran: Ran) -> bool:
    return True


def _why(step: Step, name: str) -> str:
    return (
        f"no rule for {name}" if name else f"{getattr(step.target, '__name__', step.target)} is not torch's"
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(1, n)
    return tuple(reversed(strides))


def _alive(layers: Sequence[Layer], outputs: Any) -> tuple[Layer, ...]:
    """Drop layers that nothing reads, unless they are inputs or update buffers."""
    wanted: set[str] = set()
    transform(outputs, lambda name: wanted.add(name) if isinstance(name, str) else None)
    kept: list[Layer] = []
    for layer in reversed(layers):
        updates = layer.op in ("batch_norm", "module", "instance_norm") and layer.buffers
        if layer.name in wanted or layer.kind is Kind.INPUT or updates:
            kept.append(layer)
            wanted.update(layer.inputs)
    return tuple(reversed(kept))
