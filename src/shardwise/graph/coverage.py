"""Which splits each layer allows, and how much of the work that covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.graph.graph import Graph
from shardwise.graph.layer import Kind, Layer, Operand, Source

SPLITS = ("tile", "batch", "filter", "channel")


@dataclass(frozen=True, slots=True)
class LayerCoverage:
    """Which of the splits a layer allows; `reason` says why not, for layers that run whole.

    A layer without tiles costs `flops` on every rank instead of a part of them, and its inputs of
    `gathered_bytes` are brought together on all ranks first (and their gradients spread again).
    """

    name: str
    kind: Kind
    op: str
    splits: frozenset[str]
    flops: int
    reason: str = ""
    gathered_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which splits a network allows, layer by layer."""

    layers: tuple[LayerCoverage, ...]

    @property
    def opaque(self) -> tuple[str, ...]:
        """Return the names of the layers that run whole because nothing finer is known."""
        return tuple(layer.name for layer in self.layers if layer.kind is Kind.OTHER)

    @property
    def known_flops(self) -> float:
        """Return the share of the flops in layers of known kinds."""
        total = sum(layer.flops for layer in self.layers)
        known = sum(layer.flops for layer in self.layers if layer.kind is not Kind.OTHER)
        return known / total if total else 1.0

    def share(self, split: str) -> float:
        """Return the share of the flops in layers that allow a split."""
        total = sum(layer.flops for layer in self.layers)
        return sum(layer.flops for layer in self.layers if split in layer.splits) / total if total else 1.0

    def __str__(self) -> str:
        from shardwise.graph.table import coverage_table

        return coverage_table(self)


def coverage(graph: Graph) -> Coverage:
    """Say for each layer which splits are possible, and why not."""
    pixels: dict[str, frozenset[int]] = {}
    # What ranks hold in tiles.
    held: dict[str, frozenset[int]] = {}
    found = []
    images = max((len(layer.shape) for layer in graph.inputs), default=0)
    for layer in graph:
        if layer.kind is Kind.INPUT:
            pixels[layer.name] = held[layer.name] = frozenset(range(2, len(layer.shape)))
            continue
        tiled, kept = _tile(layer, pixels)
        # Behind a layer that runs whole, images are tiled again.
        again = not tiled and len(layer.outputs[0].shape) == images
        pixels[layer.name] = frozenset(range(2, images)) if again else kept
        found.append(_layer(layer, tiled, held))
        held[layer.name] = kept
    return Coverage(tuple(found))


def _layer(layer: Layer, tiled: bool, held: Mapping[str, frozenset[int]]) -> LayerCoverage:
    tests = {"batch": _batch, "filter": _filter, "channel": _channel}
    allowed = frozenset([name for name, test in tests.items() if test(layer)] + ["tile"] * tiled)
    images = [o for o in _values(layer) if _pixels(o, held)]
    return LayerCoverage(
        layer.name,
        layer.kind,
        layer.op,
        allowed,
        layer.forward_flops,
        _reason(layer, allowed),
        0 if tiled else sum(o.spec.nbytes for o in images),
    )


def _reason(layer: Layer, allowed: frozenset[str]) -> str:
    if layer.reason:
        return layer.reason
    if "tile" in allowed or not any(len(o.spec.shape) > 2 for o in _values(layer)):
        return ""
    return "reads all pixels for every output"


def _values(layer: Layer) -> list[Operand]:
    return [o for o in layer.operands if o.origin is Source.VALUE]


def _cut(layer: Layer, dim: int) -> bool:
    """Tell whether a dimension of the output can be cut: some value that it is made from is cut with it."""
    return any(axis.out == dim for operand in _values(layer) for axis in operand.access)


def _summed(layer: Layer, dim: int) -> bool:
    return any((0, dim) in group for group in layer.contracts)


def _pixels(operand: Operand, pixels: Mapping[str, frozenset[int]]) -> list[int]:
    """Return the dimensions of a value along which its pixels lie, if there is more than one."""
    known = pixels.get(operand.source, frozenset())
    return [d for d in sorted(known) if operand.spec.shape[d] > 1]


def _tile(layer: Layer, pixels: Mapping[str, frozenset[int]]) -> tuple[bool, frozenset[int]]:
    """Tell whether tiles cut what a layer makes, or what it sums up; and where the pixels of its output lie.

    As in lowering, the largest value that has pixels decides.
    """
    values = sorted(_values(layer), key=lambda o: -o.spec.numel)
    lead = next((o for o in values if _pixels(o, pixels)), None)
    if lead is None or layer.kind is Kind.OTHER or len(layer.outputs) != 1:
        return False, frozenset()
    dims = _pixels(lead, pixels)
    index = layer.operands.index(lead)
    if layer.kind is Kind.LOSS or all(any((index, d) in group for group in layer.contracts) for d in dims):
        return True, frozenset()
    outs = frozenset(axis.out for axis in (lead.access[d] for d in dims) if axis.out is not None)
    joined = layer.attributes.get("dims", ()) if layer.op == "layer_norm" else ()
    if len(outs) < len(dims) or outs & set(joined):
        return False, frozenset()
    return True, outs


def _batch(layer: Layer) -> bool:
    """Batch shards cut dimension 0 of every value that has the batch."""
    if layer.kind is Kind.LOSS:
        return True
    shapes = [o.spec.shape for o in _values(layer)]
    if any(len(made.shape) == 0 for made in layer.outputs):
        return _summed(layer, 0)
    return bool(shapes) and _cut(layer, 0)


def _filter(layer: Layer) -> bool:
    """Filter parallelism cuts the output channels, together with the weights that make them."""
    if layer.kind in (Kind.CONVOLUTION, Kind.TRANSPOSED, Kind.LINEAR):
        weight = layer.operand("weight")
        return weight is not None and any(axis.out is not None for axis in weight.access)
    if layer.kind is Kind.OTHER or len(layer.outputs) != 1 or len(layer.shape) < 2:
        return False
    return _cut(layer, 1) and layer.op not in ("layer_norm", "matmul")


def _channel(layer: Layer) -> bool:
    """Channel parallelism cuts the input channels and sums the results."""
    weight = layer.operand("weight")
    if layer.kind not in (Kind.CONVOLUTION, Kind.TRANSPOSED, Kind.LINEAR) or weight is None:
        return False
    return any(len(group) > 1 for group in layer.contracts)
