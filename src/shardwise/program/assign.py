"""Choose where every value of a stage lives: which dimensions of it are cut over the ranks of the group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.geometry import Part, even_bounds
from shardwise.graph import Graph, Kind, Layer, Operand, Source
from shardwise.plan import Split, Way
from shardwise.program.cuts import Cuts

_WEIGHTED = (Kind.CONVOLUTION, Kind.TRANSPOSED, Kind.LINEAR)
SHORTEST = 4
# The rule of `tail=auto` for micro-batches that have fewer samples than a stage has ranks.
UNSHARED = "unshared"


@dataclass(frozen=True, slots=True)
class Home:
    """Where a value lives once it is complete.

    With `sums` the layer that makes it works on a cut contraction: every rank makes a summand of the whole
    value, and `reads` says how each value operand is cut for that. With `again` the value is whole only
    because its layer could not be split; its readers may cut it again as if it came from outside.
    """

    cuts: Cuts
    sums: bool = False
    reads: tuple[Cuts, ...] = ()
    again: bool = False


def assign(graph: Graph, layers: Iterable[Layer], split: Split, tail: str) -> dict[str, Home]:
    """Return the home of every value that the given layers make or read.

    Values from outside (model inputs, values of earlier stages) are cut the way the split says.
    """
    homes: dict[str, Home] = {}
    split = fitted(graph, split)
    for layer in layers:
        for source in layer.inputs:
            if source not in homes:
                homes[source] = Home(entry_cuts(graph[source].shape, split))
        if layer.kind is Kind.INPUT:
            homes[layer.name] = Home(entry_cuts(layer.shape, split))
        else:
            homes[layer.name] = home_of(layer, homes, split, tail)
    return homes


def fitted(graph: Graph, split: Split) -> Split:
    """Give the tile grid as many dimensions as the images of the network have."""
    return split.fitted(max((len(layer.shape) - 2 for layer in graph.inputs), default=0))


def entry_cuts(shape: tuple[int, ...], split: Split) -> Cuts:
    """Cut a value that comes from outside of the stage."""
    if split.way is Way.SPATIAL and len(shape) == len(split.grid) + 2:
        first = len(shape) - len(split.grid)
        return Cuts.along(shape, {first + i: n for i, n in enumerate(split.grid)})
    if split.way is Way.BATCH and shape:
        return Cuts.along(shape, {0: split.width})
    return Cuts.none(shape)


def home_of(layer: Layer, homes: Mapping[str, Home], split: Split, tail: str) -> Home:
    """Return where the value of one layer lives, given the homes of what it reads."""
    if len(layer.outputs) != 1:
        return Home(Cuts.none(layer.outputs[0].shape), again=True)
    values = [o for o in layer.operands if o.origin is Source.VALUE]
    known = {o.source: _cuts(o, homes, split) for o in values}
    way = split.way
    if way is Way.SPATIAL and tail == "filter" and not any(_tiled(cuts) for cuts in known.values()):
        way = Way.FILTER
    if layer.kind in _WEIGHTED and way is Way.PAIRS:
        return _paired(layer, known, split.width)
    if layer.kind in _WEIGHTED and way in (Way.FILTER, Way.CHANNEL):
        return _weighted(layer, Split(way, (split.width,)))
    # The largest operand that is cut decides, tiles before samples; the others are brought to it.
    for operand in sorted(values, key=lambda o: (-o.spec.numel, not _tiled(known[o.source]))):
        cuts = known[operand.source]
        if not cuts.dims:
            continue
        out = _follow(operand, cuts, layer)
        if out is not None and _large_enough(out, layer, split, tail):
            return Home(out)
        reads = _summands(layer, operand, cuts)
        if reads is not None:
            return Home(_tail(layer, split, tail), True, reads)
        return _whole(layer, split, tail)
    return Home(Cuts.none(layer.shape))


def _cuts(operand: Operand, homes: Mapping[str, Home], split: Split) -> Cuts:
    """Return how a value is cut, or may be cut for free because every rank holds it whole."""
    home = homes[operand.source]
    return entry_cuts(operand.spec.shape, split) if home.again else home.cuts


def _tiled(cuts: Cuts) -> bool:
    return any(d > 1 for d in cuts.dims)


def _whole(layer: Layer, split: Split, tail: str) -> Home:
    """Compute a layer that cannot be split: whole, or by samples behind the last tile.

    An opaque layer that makes an image stands between tiled layers more often than behind them: the readers
    of its value tile it again. So do those of any other one, where ranks have no samples to share instead.
    """
    behind = _tail(layer, split, tail)
    if layer.kind is not Kind.OTHER and (behind.dims or tail == "filter"):
        return Home(behind)
    entry = entry_cuts(layer.shape, split)
    again = bool(entry.dims) and tail != "replicate" and _large_enough(entry, layer, split, "auto")
    return Home(Cuts.none(layer.shape) if again else behind, again=again)


def _follow(operand: Operand, cuts: Cuts, layer: Layer) -> Cuts | None:
    """Carry the cuts of an operand over to the output; None if a cut dimension is read whole."""
    bounds: list[tuple[int, ...]] = [(0, n) for n in layer.shape]
    for dim in cuts.dims:
        axis = operand.access[dim]
        if axis.out is None or axis.out in layer.attributes.get("dims", ()) * (layer.op == "layer_norm"):
            return None
        n, total = operand.spec.shape[dim], layer.shape[axis.out]
        regrouped = dim == 1 and isinstance(axis.map, Part)
        if axis.map.size(n) == total and not regrouped:
            bounds[axis.out] = axis.map.own(cuts.bounds[dim], n)
        else:
            # Channels that were joined or picked are dealt out evenly again.
            bounds[axis.out] = even_bounds(total, len(cuts.bounds[dim]) - 1)
    return Cuts(tuple(bounds))


def _summands(layer: Layer, lead: Operand, cuts: Cuts) -> tuple[Cuts, ...] | None:
    """Cut all value operands for partial sums, if `lead` is cut only where the layer sums; else None."""
    index = layer.operands.index(lead)
    bounds: list[list[tuple[int, ...]]] = [[(0, n) for n in o.spec.shape] for o in layer.operands]
    for dim in cuts.dims:
        group = next((g for g in layer.contracts if (index, dim) in g), None)
        if group is None:
            return None
        for position, paired in group:
            bounds[position][paired] = cuts.bounds[dim]
    return tuple(
        Cuts(tuple(b)) for b, o in zip(bounds, layer.operands, strict=True) if o.origin is Source.VALUE
    )


def _large_enough(cuts: Cuts, layer: Layer, split: Split, tail: str) -> bool:
    """Stop tiling, under `tail=auto`, where the tile gets too small to pay.

    That is where a rank would own nothing; and, if all ranks can share the samples instead, where some
    tile is shorter than `SHORTEST` along a dimension that is cut: the border that a 3x3 layer brings from
    both sides would be more than half of what a rank owns.
    """
    if tail not in ("auto", UNSHARED) or split.way is not Way.SPATIAL:
        return True
    shortest = SHORTEST if _tail(layer, split, tail).dims else 1
    spatial = [bounds for bounds in cuts.bounds[2:] if len(bounds) > 2]
    return all(b - a >= shortest for bounds in spatial for a, b in itertools.pairwise(bounds))


def _tail(layer: Layer, split: Split, tail: str) -> Cuts:
    """Cut a value behind the last tiled layer: by samples where there are enough, else not at all."""
    by_batch = any(
        o.origin is Source.VALUE and o.access and o.access[0].out == 0 for o in layer.operands
    ) and bool(layer.shape)
    if split.way is not Way.SPATIAL or not by_batch or tail in ("replicate", "filter", UNSHARED):
        return Cuts.none(layer.shape)
    if tail == "auto" and layer.shape[0] < split.width:
        return Cuts.none(layer.shape)
    return Cuts.along(layer.shape, {0: split.width})


def _paired(layer: Layer, known: Mapping[str, Cuts], width: int) -> Home:
    """Sum over the channels if they come cut, and then everybody holds the sum; else cut the filters."""
    operand = layer.operands[0]
    cuts = known[operand.source]
    grouped = layer.attributes.get("groups", 1) > 1
    reads = _summands(layer, operand, cuts) if cuts.dims and not grouped else None
    if reads is not None:
        return Home(Cuts.none(layer.shape), True, reads)
    return _weighted(layer, Split(Way.FILTER, (width,)))


def _weighted(layer: Layer, split: Split) -> Home:
    """Split a layer with weights by filters, or by the channels that it sums over."""
    operand = layer.operands[0]
    features = len(layer.shape) - 1 if layer.kind is Kind.LINEAR else 1
    if layer.attributes.get("groups", 1) > 1:
        return _grouped(layer, split)
    out = Cuts.along(layer.shape, {features: split.width})
    enough = layer.shape[features] >= split.width
    group = next((g for g in layer.contracts if g[0][0] == 0), None)
    if split.way is Way.CHANNEL and group is not None:
        dim = group[0][1]
        if operand.spec.shape[dim] >= split.width:
            reads = _summands(layer, operand, Cuts.along(operand.spec.shape, {dim: split.width}))
            if reads is not None:
                return Home(out if enough else Cuts.none(layer.shape), True, reads)
    return Home(out if enough else Cuts.none(layer.shape))


def _grouped(layer: Layer, split: Split) -> Home:
    """Share out the groups of a grouped convolution: a rank needs only the channels of its own groups."""
    groups: int = layer.attributes["groups"]
    if groups < split.width:
        return Home(Cuts.none(layer.shape))
    outputs = layer.shape[1] // groups
    bounds = [(0, n) for n in layer.shape]
    return Home(
        Cuts(
            tuple(
                tuple(b * outputs for b in even_bounds(groups, split.width)) if d == 1 else b
                for d, b in enumerate(bounds)
            )
        )
    )
