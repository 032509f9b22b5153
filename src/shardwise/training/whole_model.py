"""Models that cannot be captured: one layer that runs the user's module whole, for data parallelism alone.

Such a model decides by the values of its tensors, so nobody knows what its parts would read. Every replica
can still run all of it on its own samples. Its batch norms are out of reach: each replica normalises with its
own samples (`batch_norm=local`, the meaning of DistributedDataParallel), and the first replica's running
statistics are everybody's after each step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.geometry.access import opaque, same
from shardwise.graph import (
    Call,
    CaptureError,
    Graph,
    Kind,
    Layer,
    ModuleTarget,
    Operand,
    Ref,
    SizeError,
    Source,
    TensorSpec,
    capture,
    functional,
)
from shardwise.graph.capture import untouched
from shardwise.graph.example import Example, read_example, spec_of
from shardwise.graph.graph import Shapes
from shardwise.graph.trace import leaves, transform
from shardwise.plan import Plan, PlanError
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.materialise import on_meta

SOURCE = "whole"


def network_of(model: nn.Module, example: Any, *, training: bool) -> Graph:
    """Capture a model; one that cannot be captured becomes a single layer, with a note that says why."""
    try:
        return capture(model, example, training=training)
    except SizeError:
        raise
    except CaptureError as refusal:
        if on_meta(model):
            raise
        return _whole_graph(model, read_example(model.forward, example), training, refusal)


def is_whole(graph: Graph) -> bool:
    """Tell whether a graph stands for a model that could not be captured."""
    return graph.source == SOURCE


def whole_plan(model: nn.Module, ranks: int) -> Plan:
    """Return the one kind of plan that such a model can have."""
    norm = " batch_norm=local" if ranks > 1 and _has_batch_norm(model) else ""
    return Plan.parse(f"data={ranks}{norm}")


def check_whole(graph: Graph, model: nn.Module, plan: Plan) -> None:
    """Refuse to split a model that could not be captured by anything but its samples."""
    if not is_whole(graph):
        return
    why = graph.notes[0]
    if len(plan.stages) > 1 or plan.stages[0].width > 1:
        raise PlanError("stages", why, f"nearest plan that works: {whole_plan(model, plan.ranks)}")
    if plan.data > 1 and plan.batch_norm != "local" and _has_batch_norm(model):
        raise PlanError(
            "batch_norm",
            f"{why} Its batch norms cannot share statistics over replicas",
            f"nearest plan that works: {plan.replace(batch_norm='local')}",
        )


def share_buffers(model: nn.Module, fabric: Fabric) -> None:
    """Give all ranks the first rank's buffers; collective over the world."""
    buffers = [buffer for buffer in model.buffers() if buffer.numel()]
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers if buffer.dtype is not torch.bool):
        alike = [buffer for buffer in buffers if buffer.dtype is dtype]
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in alike])
        if fabric.rank:
            flat.zero_()
        fabric.world.all_reduce(flat)
        pieces = torch.split_with_sizes(flat, [buffer.numel() for buffer in alike])
        for buffer, piece in zip(alike, pieces, strict=True):
            buffer.data.copy_(piece.view(buffer.shape))


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def _whole_graph(model: nn.Module, example: Example, training: bool, refusal: CaptureError) -> Graph:
    place = f" ({refusal.where})" if refusal.where else ""
    note = f"The model could not be captured: {refusal.what}{place}. Only data parallelism is possible."
    first = tuple(spec.shape for spec in example.specs)
    result = _try(model, example, first, training)
    parameters = {name: spec_of(p) for name, p in model.named_parameters()}
    buffers = {name: spec_of(b) for name, b in model.named_buffers()}
    frozen = frozenset(name for name, p in model.named_parameters() if not p.requires_grad)

    def build(shapes: Shapes) -> Graph:
        alike = all(a[1:] == b[1:] for a, b in zip(shapes, first, strict=True))
        resized = _resized(result, first[0][0], shapes[0][0])
        specs = resized if alike else _try(model, example, shapes, training)
        layers, outputs = _layers(example, shapes, specs, {**parameters, **buffers}, set(parameters), note)
        return Graph(
            layers,
            outputs,
            parameters,
            buffers,
            training,
            frozen=frozen,
            source=SOURCE,
            notes=(note,),
            rebuild=build,
        )

    return build(first)


def _try(model: nn.Module, example: Example, shapes: Shapes, training: bool) -> Any:
    """Run the model once, to see what it returns; it is left as it was."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    values = example.sample(device)
    for (name, tensor), shape in zip(list(values.items()), shapes, strict=True):
        if tuple(tensor.shape) != shape:
            values[name] = torch.zeros(shape, dtype=tensor.dtype, device=device)
    args, kwargs = example.fill(values)
    with untouched(model, training), torch.no_grad():
        return transform(model(*args, **kwargs), lambda t: spec_of(t) if isinstance(t, Tensor) else t)


def _resized(result: Any, was: int, samples: int) -> Any:
    def leaf(spec: Any) -> Any:
        if not isinstance(spec, TensorSpec) or not spec.shape or spec.shape[0] != was:
            return spec
        return TensorSpec((samples, *spec.shape[1:]), spec.dtype)

    return transform(result, leaf)


def _layers(
    example: Example,
    shapes: Shapes,
    result: Any,
    state: dict[str, TensorSpec],
    parameters: set[str],
    why: str,
) -> tuple[tuple[Layer, ...], Any]:
    """Return the inputs, the model as one layer, and a layer for each tensor of a nested result."""
    inputs = []
    for i, (name, spec, shape) in enumerate(zip(example.names, example.specs, shapes, strict=True)):
        own = TensorSpec(shape, spec.dtype)
        inputs.append(Layer(name, Kind.INPUT, "input", outputs=(own,), attributes={"index": i}))
    operands = [
        Operand(f"input{i}", layer.name, Source.VALUE, layer.spec, opaque(len(layer.shape)))
        for i, layer in enumerate(inputs)
    ]
    for name, spec in state.items():
        origin = Source.PARAMETER if name in parameters else Source.BUFFER
        operands.append(Operand(name, name, origin, spec, opaque(len(spec.shape))))
    args, kwargs = example.fill({layer.name: Ref(i) for i, layer in enumerate(inputs)})
    made = tuple(leaf for leaf in leaves(result) if isinstance(leaf, TensorSpec))
    name = next(n for n in ("model", "model_", "model__") if n not in {layer.name for layer in inputs})
    model = Layer(
        name,
        Kind.OTHER,
        "module",
        tuple(operands),
        made,
        attributes={"state": tuple(state)},
        call=Call(ModuleTarget(""), args, kwargs),
        reason=why,
    )
    if isinstance(result, TensorSpec):
        return (*inputs, model), name
    parts = [_part(model, i, spec) for i, spec in enumerate(made)]
    names = iter(part.name for part in parts)
    outputs = transform(result, lambda leaf: next(names) if isinstance(leaf, TensorSpec) else leaf)
    return (*inputs, model, *parts), outputs


def _part(model: Layer, index: int, spec: TensorSpec) -> Layer:
    operand = Operand("input0", model.name, Source.VALUE, spec, same(len(spec.shape)))
    return Layer(
        f"{model.name}.{index}",
        Kind.OTHER,
        "getitem",
        (operand,),
        (spec,),
        attributes={"index": index},
        call=Call(functional.pick, (Ref(0), index)),
        reason="part of an opaque layer's result",
    )
