"""Find layers of a network that mix its samples, which must then be together: no share of them would do.

Every value is followed with the dimensions that its samples lie along. A layer mixes samples if it reads all
of them for one output, or puts those of one operand beside others of another one. Batch norm is no such
layer, because its sums run over all replicas. Of a layer that runs whole nobody knows the geometry; what it
makes is known by its growth with the batch, and a function of torch by what it does (see `probe`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property

from shardwise.geometry.axes import Same
from shardwise.geometry.parts import Groups
from shardwise.graph import CaptureError, Graph, Kind, Layer, Operand, Source
from shardwise.training.probe import Carried, mixes_samples
from shardwise.training.sample_dims import (
    Dims,
    Factor,
    carries,
    in_turn,
    joined,
    regrouped,
    samples_along,
    sliced,
    without_samples,
)

LOSS = "loss."
"""How the names of the layers of an attached loss begin."""


class Mixed(Exception):
    """A layer mixes samples."""


# Plans by the thousand ask about the same network.
_found: dict[int, tuple[weakref.ref[Graph], Layer | None]] = {}


def mixing_layer(graph: Graph) -> Layer | None:
    """Return the first layer that mixes samples, of a network without or in front of its loss."""
    key = id(graph)
    if key not in _found or _found[key][0]() is not graph:
        _found[key] = (weakref.ref(graph, lambda _: _found.pop(key, None)), _Walk(graph).first())
    return _found[key][1]


class _Walk:
    """Follow the samples through a network."""

    def __init__(self, graph: Graph) -> None:
        # With one sample, dimensions of one element would all look like the batch.
        self.graph = graph if graph.batch > 1 else graph.with_batch(2)
        self.values: dict[str, Dims | None] = {}

    def first(self) -> Layer | None:
        wanted = _read(self.graph)
        for layer in self.graph:
            if layer.name not in wanted or layer.name.startswith(LOSS):
                continue
            try:
                self.values[layer.name] = self._follow(layer)
            except Mixed:
                return layer
        return None

    @cached_property
    def _twice(self) -> Mapping[str, Layer]:
        """Return the layers for twice as many samples; none where the network cannot have as many."""
        try:
            return self.graph.with_batch(2 * self.graph.batch).by_name
        except (CaptureError, ValueError):
            return {}

    def _follow(self, layer: Layer) -> Dims | None:
        if layer.kind is Kind.INPUT:
            return samples_along(layer.shape, 0, layer.shape[0]) if layer.shape else ()
        reads: list[Carried] = []
        unknown = False
        for operand in layer.operands:
            if operand.origin is Source.VALUE:
                dims = self.values[operand.source]
                unknown |= dims is None
                if dims is not None and any(map(carries, dims)):
                    reads.append((operand, dims))
        if unknown or (reads and _runs_whole(layer)):
            return self._grown(layer, () if unknown else reads)
        if not reads:
            return without_samples(layer.shape) if len(layer.outputs) == 1 else None
        return _RULES.get(layer.op, _tied)(layer, reads)

    def _grown(self, layer: Layer, reads: tuple[Carried, ...] | list[Carried]) -> Dims | None:
        """Return what a layer of unknown geometry makes: samples lie along the one dimension that grows."""
        other = self._twice.get(layer.name)
        if other is None or len(other.outputs) != len(layer.outputs):
            return None
        grown = []
        for here, there in zip(layer.outputs, other.outputs, strict=True):
            dims = [d for d, n in enumerate(here.shape) if there.shape[d] != n]
            grown.append(dims[0] if len(dims) == 1 else None)
        if reads and mixes_samples(layer, reads, grown, self.graph.batch):
            raise Mixed
        if len(grown) != 1 or grown[0] is None or layer.shape[grown[0]] % self.graph.batch:
            return None
        return samples_along(layer.shape, grown[0], self.graph.batch)


def _read(graph: Graph) -> set[str]:
    """Return the layers that the outputs are made of: the others change no gradient."""
    wanted = set(graph.output_names)
    for layer in reversed(graph.layers):
        if layer.name in wanted:
            wanted.update(layer.inputs)
    return wanted


def _runs_whole(layer: Layer) -> bool:
    values = [o for o in layer.operands if o.origin is Source.VALUE]
    unknown = layer.kind is Kind.OTHER and all(axis.out is None for o in values for axis in o.access)
    return unknown or layer.kind is Kind.LOSS or len(layer.outputs) != 1


def _tied(layer: Layer, reads: list[Carried]) -> Dims | None:
    """Follow samples through the access of a layer: all operands must have them at the same places."""
    places = [_places(operand, dims, layer.shape) for operand, dims in reads]
    if any(place != places[0] for place in places):
        raise Mixed
    (place, *_) = places
    if layer.attributes.get("batch_statistics") and 1 in place:
        # Samples that pose as channels have statistics of their own, which no sum over replicas may join.
        raise Mixed
    return _with(layer.shape, place)


def _places(operand: Operand, dims: Dims, shape: tuple[int, ...]) -> dict[int, tuple[Factor, ...]]:
    found: dict[int, tuple[Factor, ...]] = {}
    for factors, axis in zip(dims, operand.access, strict=True):
        if not carries(factors):
            continue
        if axis.out is None:
            raise Mixed
        if isinstance(axis.map, Groups):
            factors = _grouped(factors, axis.map, shape[axis.out])
        elif not isinstance(axis.map, Same):
            raise Mixed
        found[axis.out] = factors
    return found


def _grouped(factors: tuple[Factor, ...], groups: Groups, outputs: int) -> tuple[Factor, ...]:
    """Follow samples that pose as the groups of a convolution."""
    samples, apart = factors[0]
    inside = math.prod(size for size, _ in factors[1:])
    if not apart or carries(factors[1:]) or inside % groups.inputs:
        raise Mixed
    return joined([factors[0], (outputs // samples, 0)])


def _with(shape: tuple[int, ...], place: Mapping[int, tuple[Factor, ...]]) -> Dims | None:
    dims = list(without_samples(shape))
    for dim, factors in place.items():
        if math.prod(size for size, _ in factors) != shape[dim]:
            return None
        dims[dim] = factors
    return tuple(dims)


def _reshape(layer: Layer, reads: list[Carried]) -> Dims | None:
    return regrouped(reads[0][1], layer.shape)


def _repeat(layer: Layer, reads: list[Carried]) -> Dims | None:
    """Follow samples that are repeated one after another."""
    dims, times = reads[0][1], layer.attributes["times"]
    padded = ((),) * (len(times) - len(dims)) + dims
    return tuple(joined([(n, 0), *factors]) for n, factors in zip(times, padded, strict=True))


def _slice(layer: Layer, reads: list[Carried]) -> Dims | None:
    """Follow samples through a slice, which may take all samples of some copies or frames."""
    settings, result = layer.attributes, []
    cuts = zip(settings["starts"], settings["stops"], settings["steps"], strict=True)
    for factors, cut, n in zip(reads[0][1], cuts, layer.shape, strict=True):
        left = sliced(factors, *cut) if carries(factors) else joined([(n, 0)])
        if left is None:
            raise Mixed
        result.append(left)
    return tuple(result)


def _cat(layer: Layer, reads: list[Carried]) -> Dims | None:
    """Follow samples through a concatenation along them; beside other things they cannot be told apart."""
    dim = layer.attributes["dim"]
    if not any(carries(dims[dim]) for _, dims in reads):
        return _tied(layer, reads)
    both = in_turn([dims[dim] for _, dims in reads]) if len(reads) == len(layer.inputs) else None
    return None if both is None else _with(layer.shape, {dim: both})


_RULES: dict[str, Callable[[Layer, list[Carried]], Dims | None]] = {
    "reshape": _reshape,
    "repeat": _repeat,
    "slice": _slice,
    "cat": _cat,
}
