"""Let a batch norm rectify its own result: one pass over the tensor instead of two, forwards and backwards.

    batch norm -> relu -> ...      becomes      batch norm that rectifies -> ...

where nobody else reads what the norm makes. The rectification disappears from the list; its value is made by
the norm, and backward finds its mask from what the norm keeps anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from shardwise.graph import Graph, Source
from shardwise.program.norms import has_statistics
from shardwise.program.ops import Compute, Normalise, Op, Regrid


def rectified(ops: Sequence[Op], departures: Collection[str]) -> list[Op]:
    """Return the operations of a stage with such pairs put into one.

    Args:
        ops: in order.
        departures: slots that are wanted outside of the stage.
    """
    readers = Counter(departures)
    for op in ops:
        readers.update([op.source.slot] if isinstance(op, Regrid) else [held.slot for held in op.reads])
    norms = {
        op.makes.slot: op
        for op in ops
        if isinstance(op, Normalise) and op.layer.op == "batch_norm" and readers[op.makes.slot] == 1
    }
    behind = {
        op.reads[0].slot: op
        for op in ops
        if isinstance(op, Compute) and op.layer.op == "relu" and _alike(op, norms.get(op.reads[0].slot))
    }
    gone = {op.makes.slot for op in behind.values()}
    return [
        replace(op, makes=behind[op.makes.slot].makes, rectifies=True)
        if isinstance(op, Normalise) and op.makes.slot in behind
        else op
        for op in ops
        if not isinstance(op, Compute) or op.makes.slot not in gone
    ]


def rectified_layers(graph: Graph) -> frozenset[str]:
    """Return the rectifications of a network that disappear where its batch norms share statistics.

    Unless a stage ends between the two.
    """
    readers = Counter(graph.output_names)
    for layer in graph.layers:
        readers.update(o.source for o in layer.operands if o.origin is Source.VALUE)
    norms = {
        layer.name
        for layer in graph.layers
        if layer.op == "batch_norm" and has_statistics(layer) and readers[layer.name] == 1
    }
    pairs = ((layer, layer.operands[0].source) for layer in graph.layers if layer.op == "relu")
    return frozenset(layer.name for layer, source in pairs if source in norms)


def _alike(op: Compute, norm: Normalise | None) -> bool:
    """Tell whether every rank rectifies exactly what its norm makes."""
    if norm is None or op.makes.grad != norm.makes.grad or op.makes.spec.dtype != norm.makes.spec.dtype:
        return False
    boxes = norm.makes.layout.boxes
    return op.wants[0].boxes == boxes == op.makes.layout.boxes
