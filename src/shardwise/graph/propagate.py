"""Turn a trace into the graph for given input shapes, without computing anything.

Every step is run on tensors without data and described by its rule. Sizes are plain numbers here: what
the user's code computes from them is computed again for every set of shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.geometry.access import Access, opaque, same
from shardwise.graph import functional
from shardwise.graph.canonical import name_of
from shardwise.graph.errors import CaptureError, Opaque, SizeError
from shardwise.graph.fake import Fakes, Made, Ran, Value, distinct
from shardwise.graph.graph import Graph, Shapes
from shardwise.graph.layer import Kind, Layer, Literal, ModuleTarget, Source, TensorSpec
from shardwise.graph.lines import error_line, first_line
from shardwise.graph.normalise import apply_rule, has_rule
from shardwise.graph.site import Site, module_state, part_name, value_of
from shardwise.graph.trace import Held, Result, Step, Trace, Weight, leaves, transform


def propagate(trace: Trace, shapes: Shapes, fakes: Fakes | None = None) -> Graph:
    """Return the graph of a traced model for these input shapes."""
    why_not = trace.refuse(shapes) if trace.refuse is not None else ""
    if why_not:
        raise SizeError(why_not)
    specs = [TensorSpec(tuple(shape), spec.dtype) for shape, spec in zip(shapes, trace.specs, strict=True)]
    run = Propagation(trace.inputs, specs, fakes or Fakes(trace.modules))
    run.hold(trace.held)
    run.follow(trace.steps)
    run.check_views(trace.steps)
    outputs = transform(run.resolve(trace.output), run.output)
    parameters = {n: h.spec for n, h in trace.held.items() if h.origin is Source.PARAMETER}
    buffers = {n: h.spec for n, h in trace.held.items() if h.origin is Source.BUFFER}
    return Graph(
        layers=alive(run.layers, outputs),
        outputs=outputs,
        parameters=parameters,
        buffers=buffers,
        training=trace.training,
        tied=dict(trace.tied),
        frozen=frozenset(n for n in parameters if not trace.held[n].trained),
        source=trace.source,
        constants=dict(trace.constants),
        notes=trace.notes,
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


class Propagation:
    """Follow the steps of a trace with values that have shapes but no data."""

    def __init__(self, names: Sequence[str], specs: Sequence[TensorSpec], fakes: Fakes) -> None:
        self.fakes = fakes
        self.names = _Names()
        self.layers: list[Layer] = []
        self.results: dict[str, Any] = {}
        self.held: dict[str, Value] = {}
        self.position = 0
        for i, (name, spec) in enumerate(zip(names, specs, strict=True)):
            self._input(i, name, spec)

    def hold(self, held: Mapping[str, Held]) -> None:
        """Take what the model holds."""
        for name, h in held.items():
            if name not in self.held:
                stride = _contiguous(h.spec.shape)
                self.held[name] = Value(name, h.origin, h.spec, stride, h.trained, name)

    def follow(self, steps: Sequence[Step]) -> None:
        """Run the steps that were not run yet."""
        for step in steps[self.position :]:
            self.results[step.id] = self._step(step)
            self.position += 1

    def check_views(self, steps: Sequence[Step]) -> None:
        """Refuse in-place calls that also change another value, through a view, that is read later."""
        last: dict[str, int] = {}
        for i, step in enumerate(steps):
            for leaf in leaves((step.args, dict(step.kwargs))):
                if isinstance(leaf, Result):
                    last[leaf.id] = i
        made = {step.id: i for i, step in enumerate(steps)}
        sharing: dict[str, list[str]] = {}
        for id, value in self.results.items():
            if isinstance(value, Value) and id in made:
                sharing.setdefault(value.owner, []).append(id)
        for i, step in enumerate(steps):
            changed = self.results.get(step.mutates)
            if not isinstance(changed, Value):
                continue
            for other in sharing.get(changed.owner, ()):
                if self.results[other] is not changed and made[other] < i < last.get(other, -1):
                    what = f"{step.label} changes in place what {steps[made[other]].label} shows a view of"
                    raise CaptureError(what, step.where)

    def _input(self, index: int, name: str, spec: TensorSpec) -> None:
        unique = self.names(name)
        self.layers.append(Layer(unique, Kind.INPUT, "input", outputs=(spec,), attributes={"index": index}))
        stride = _contiguous(spec.shape)
        self.results[name] = Value(unique, Source.VALUE, spec, stride, False, unique)

    def resolve(self, tree: Any) -> Any:
        """Return `tree` with the values in the places of references."""

        def leaf(item: Any) -> Any:
            if isinstance(item, Result):
                return self.results[item.id]
            return self.held[item.name] if isinstance(item, Weight) else item

        return transform(tree, leaf)

    def _step(self, step: Step) -> Any:
        args, kwargs = self.resolve(step.args), self.resolve(dict(step.kwargs))
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
            what = f"{step.label}: {first_line(error)}"
            raise CaptureError(what, error_line(error) or step.where) from error

    def _guard(self, step: Step, args: tuple[Any, ...]) -> Any:
        (value,) = args
        found = value.shape[0] if isinstance(value, Value) else step.target(value)
        if found != step.guard:
            what = "the model's code depends on a size here"
            raise SizeError(f"{what}: captured with {step.guard!r}, these shapes give {found!r}", step.where)
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
            op="module" if is_module else _op(name_of(step.target)),
            reads=reads,
            attributes=attributes,
            flops=(forward, 2 * forward * any(made.trained for made in ran.made)),
            reason=reason,
        )
        return self._spread(site, ran, value)

    def _spread(self, site: Site, ran: Ran, value: Value) -> Any:
        """Give each tensor of a nested result a layer of its own; a single tensor is the layer itself."""
        if isinstance(ran.result, Made):
            return value
        numbers = itertools.count()

        def leaf(item: Any) -> Any:
            if not isinstance(item, Made):
                return item
            i = next(numbers)
            whole = Value(value.name, Source.VALUE, item.spec, item.stride, item.trained, value.name)
            # Each tensor owns its memory: the nested result is no tensor itself.
            picked = Ran(replace(item, alias=None), (whole,), (), (), 0)
            access: Access = same(len(item.shape))
            part = site.add(
                picked,
                (functional.pick, (whole, i), {}),
                kind=Kind.OTHER,
                op="getitem",
                reads=[("input0", whole, access)],
                attributes={"index": i},
                base=part_name(value.name, i),
                reason="part of an opaque layer's result",
            )
            return value_of(item, part.name, ran) if item.alias is not None else part

        return transform(ran.result, leaf)

    def output(self, item: Any) -> Any:
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


def _op(name: str) -> str:
    # "getitem" is kept for picking a tensor from a nested result.
    plain = name.removeprefix("aten.").strip("_") or "function"
    return "index" if plain == "getitem" else plain


_RANDOM = ("rand", "randn", "randint", "randperm", "bernoulli", "normal", "uniform", "multinomial")


def _why(step: Step, name: str) -> str:
    if not name:
        return f"{getattr(step.target, '__name__', step.target)} is not torch's own function"
    if name.removesuffix("_like").strip("_") in _RANDOM:
        return f"{name} draws random numbers: a part of them would be others"
    return f"no rule for {name}"


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(1, n)
    return tuple(reversed(strides))


def alive(layers: Sequence[Layer], outputs: Any) -> tuple[Layer, ...]:
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
