"""Where a step gets its data from: whole mini-batches, or only what a rank needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.geometry import Box
from shardwise.graph import Graph, Kind
from shardwise.graph.example import read_example
from shardwise.graph.foreign import Foreign
from shardwise.plan import direction_of
from shardwise.runtime.counts import Feed
from shardwise.runtime.engine import Engine, in_batch


@dataclass(frozen=True, slots=True)
class Need:
    """A box of an input or target that a rank reads, in coordinates of the whole mini-batch.

    Args:
        input: position among all inputs and targets.
        name: its name in the graph.
        box: which samples and pixels.
    """

    input: int
    name: str
    box: Box


def input_tensors(model: nn.Module, x: Any) -> list[Tensor]:
    """Return the tensors of a model's input in the order of its arguments."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(model, Foreign):
        return model.flatten(x)
    return [t for t in read_example(model.forward, x).tensors if t is not None]


def whole_feed(graph: Graph, tensors: Sequence[Tensor]) -> Feed:
    """Feed from whole tensors, one per input of the graph."""
    by_name = {layer.name: t for layer, t in zip(graph.inputs, tensors, strict=True)}
    return lambda name, box: by_name[name][box.slices()]


def parts_feed(needs: Sequence[Need], parts: Sequence[Tensor]) -> Feed:
    """Feed from exactly the boxes that a rank needs."""
    if len(parts) != len(needs):
        raise ValueError(f"this rank needs {len(needs)} parts, {len(parts)} given; see Trainer.needs")
    by_box = {}
    for need, part in zip(needs, parts, strict=True):
        if tuple(part.shape) != need.box.shape:
            raise ValueError(
                f"input {need.input} ({need.name}): {tuple(part.shape)} given, {need.box} needed"
            )
        by_box[need.name, need.box] = part
    return lambda name, box: by_box[name, box]


def samples_feed(graph: Graph, samples: Sequence[int], tensors: Sequence[Tensor]) -> Feed:
    """Feed from some samples of a mini-batch: row i of every tensor is the sample `samples[i]` of it."""
    by_name = {layer.name: t for layer, t in zip(graph.inputs, tensors, strict=True)}
    row = {sample: i for i, sample in enumerate(samples)}

    def feed(name: str, box: Box) -> Tensor:
        tensor = by_name[name]
        if not box.ndim:
            return tensor
        if box.empty:
            return tensor.new_empty(box.shape)
        # The samples of a micro-batch are consecutive, and so are their rows.
        first = row[box.lo[0]]
        return tensor[box.replace(0, (first, first + box.shape[0])).slices()]

    return feed


def needs_of(engine: Engine) -> list[Need]:
    """Return the boxes of inputs and targets that this rank's stages read, without repeats."""
    graph = engine.lowered.graph
    index = {layer.name: i for i, layer in enumerate(graph.inputs)}
    found: dict[tuple[str, Box], Need] = {}
    for (_, m), stage in sorted(engine.stages.items(), key=lambda item: item[0]):
        lo, _ = engine.lowered.samples(engine.replica, m)
        for held in stage.program.arrivals.values():
            if graph[held.value].kind is Kind.INPUT:
                box = in_batch(held.layout.box(stage.rank), lo)
                found[held.value, box] = Need(index[held.value], held.value, box)
    for stage_number, name in engine.counts.inputs if engine.counts is not None else ():
        for m in range(engine.lowered.program.micro_batches):
            group = engine.bench.fabric.mesh.group(
                engine.replica, stage_number, direction_of(engine.lowered.plan, m)
            )
            lo, hi = engine.lowered.samples(engine.replica, m)
            if group[0] == engine.bench.fabric.rank and hi > lo:
                shape = graph[name].shape
                box = Box((lo, *(0,) * (len(shape) - 1)), (hi, *shape[1:]))
                found[name, box] = Need(index[name], name, box)
    return list(found.values())
