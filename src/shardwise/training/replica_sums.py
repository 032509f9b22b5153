"""Make a loss that is no mean over samples exact over data replicas, such as a Dice of the whole batch.

A ratio of sums needs the sums of all replicas before it divides. So behind every layer that sums or averages
over the samples comes one that adds its value up over the replicas; all that follows is then the same number
on every replica, and the adjoint of that sum is the same sum of gradients.

    per sample  ->  sum of this replica  ->  replica_sum  ->  ratio, logarithm ... of the whole micro-batch
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.geometry.access import Axis
from shardwise.graph import Graph, Kind, Layer, Operand, Source
from shardwise.graph.graph import Shapes
from shardwise.program.replica_sum import REPLICA_SUM
from shardwise.training.loss_kind import CONST, MEAN, OTHER, SAMPLES, SUM, of_samples

_GLOBAL = "global"


def with_replica_sums(loss: Graph) -> Graph | None:
    """Return a captured loss whose sums run over all replicas; None where that does not make it exact."""
    kinds: dict[str, str] = {}
    sums: dict[str, str] = {}
    for layer in loss:
        kind = SAMPLES if layer.kind is Kind.INPUT else _kind(layer, kinds, loss.batch)
        if kind == OTHER:
            return None
        if kind in (SUM, MEAN):
            sums[layer.name], kind = kind, _GLOBAL
        kinds[layer.name] = kind
    return _inserted(loss, sums)


def _inserted(loss: Graph, sums: dict[str, str]) -> Graph:
    """Put a sum over replicas behind the layers of the given names; which they are no size changes."""
    layers: list[Layer] = []
    names: dict[str, str] = {}
    for layer in loss:
        layers.append(replace(layer, operands=tuple(_renamed(o, names) for o in layer.operands)))
        if layer.name in sums:
            layers.append(_total(layer, sums[layer.name], loss.batch))
            names[layer.name] = layers[-1].name
    output = loss.output_names[0]

    def rebuild(shapes: Shapes) -> Graph:
        return _inserted(loss.at(*shapes), sums)

    return replace(loss, layers=tuple(layers), outputs=names.get(output, output), rebuild=rebuild)


def _kind(layer: Layer, kinds: dict[str, str], batch: int) -> str:
    reads = {kinds[o.source] for o in layer.operands if o.origin is Source.VALUE}
    if SAMPLES in reads:
        return of_samples(layer, kinds, batch)
    return _GLOBAL if _GLOBAL in reads else CONST


def _renamed(operand: Operand, names: dict[str, str]) -> Operand:
    if operand.origin is not Source.VALUE or operand.source not in names:
        return operand
    return replace(operand, source=names[operand.source])


def _total(layer: Layer, kind: str, batch: int) -> Layer:
    spec = layer.spec
    access = tuple(Axis(dim) for dim in range(len(spec.shape)))
    return Layer(
        f"{layer.name}.over_replicas",
        Kind.REDUCTION,
        REPLICA_SUM,
        (Operand("input", layer.name, Source.VALUE, spec, access),),
        (spec,),
        # A mean counts as much as the samples that it was taken over.
        {"dims": (), "samples": batch if kind == MEAN else None},
    )
