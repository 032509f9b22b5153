"""Put a loss behind a network, so that both are split, priced and run as one graph."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.graph.graph import Graph, Shapes
from shardwise.graph.layer import Kind, Layer, ModuleTarget, Operand, Source


def attach(model: Graph, loss: Graph, prefix: str = "loss") -> Graph:
    """Return one graph that ends in the loss.

    The first inputs of `loss` are the outputs of `model`, in order; the others, its targets, become
    further inputs of the whole. Layers of the loss are named `<prefix>.<name>`.
    """
    outputs = model.output_names
    if len(loss.inputs) < len(outputs):
        raise ValueError(f"attach: the loss reads {len(loss.inputs)} tensors, the model makes {len(outputs)}")
    names: dict[str, str] = {}
    for layer, output in zip(loss.inputs, outputs, strict=False):
        names[layer.name] = output
    targets: list[Layer] = []
    for layer in loss.inputs[len(outputs) :]:
        names[layer.name] = f"{prefix}.{layer.name}"
        index = len(model.inputs) + len(targets)
        targets.append(
            replace(layer, name=names[layer.name], attributes={**layer.attributes, "index": index})
        )
    work = [layer for layer in loss.layers if layer.kind is not Kind.INPUT]
    for layer in work:
        names[layer.name] = f"{prefix}.{layer.name}"
    inputs = [layer for layer in model.layers if layer.kind is Kind.INPUT]
    others = [layer for layer in model.layers if layer.kind is not Kind.INPUT]
    parameters = {f"{prefix}.{name}": spec for name, spec in loss.parameters.items()}
    buffers = {f"{prefix}.{name}": spec for name, spec in loss.buffers.items()}
    return replace(
        model,
        layers=(*inputs, *targets, *others, *(_renamed(layer, names, prefix) for layer in work)),
        outputs=names[loss.output_names[0]],
        parameters={**model.parameters, **parameters},
        buffers={**model.buffers, **buffers},
        frozen=model.frozen | {f"{prefix}.{name}" for name in loss.frozen},
        constants={**model.constants, **{f"{prefix}.{name}": t for name, t in loss.constants.items()}},
        rebuild=_Rebuild(model, loss, prefix),
    )


@dataclass(frozen=True, slots=True)
class _Rebuild:
    """Make the graph of a model and its loss for other input shapes."""

    model: Graph
    loss: Graph
    prefix: str

    @property
    def decides(self) -> bool:
        """Tell whether the model or the loss goes other ways for some shapes."""
        return any(getattr(graph.rebuild, "decides", True) for graph in (self.model, self.loss))

    def __call__(self, shapes: Shapes) -> Graph:
        """Return the graph for these shapes."""
        split = len(self.model.inputs)
        front = self.model.at(*shapes[:split])
        made = tuple(front[name].shape for name in front.output_names)
        return attach(front, self.loss.at(*made, *shapes[split:]), self.prefix)


def _renamed(layer: Layer, names: dict[str, str], prefix: str) -> Layer:
    def rename(operand: Operand) -> Operand:
        if operand.origin is Source.VALUE:
            return replace(operand, source=names[operand.source])
        return replace(operand, source=f"{prefix}.{operand.source}")

    saves = tuple(names.get(name, name) for name in layer.saves)
    call = layer.call
    if call is not None and isinstance(call.target, ModuleTarget):
        call = replace(call, target=ModuleTarget(f"{prefix}.{call.target.path}"))
    operands = tuple(rename(o) for o in layer.operands)
    return replace(layer, name=names[layer.name], operands=operands, saves=saves, call=call)
