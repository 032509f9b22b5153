"""How the loss of a mini-batch follows from the losses of its shares.

    mean    L(all) = sum of (part of the samples) x L(share)        means, and built-in losses of any kind
    sum     L(all) = sum of L(share)                                 sums that the loss takes itself
    other   neither can be shown

Built-in losses count as means whatever they divide by, because the runtime corrects their denominators (but
not those of losses that divide by weights of single elements). A value is followed through the graph of the
loss: per sample, then summed or averaged over the samples, then only scaled and added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.graph import Graph, Kind, Layer, Operand, Source
from shardwise.program.losses import CLASSES, is_summed, is_weighed

CONST, SAMPLES, MEAN, SUM, OTHER = "const", "samples", "mean", "sum", "other"
_KEEP = frozenset(
    {"neg", "to", "float", "double", "half", "bfloat16", "clone", "contiguous", "identity", "positive"}
    | {"detach", "reshape", "squeeze", "unsqueeze", "view", "flatten", "type_as", "type", "alias"}
)
_ALONG = frozenset({"scatter", "scatter_", "scatter_add", "scatter_add_", "gather", "take_along_dim"})
"""Functions that no split enters, but that treat every sample alone along any dimension but the first."""
_SCALE = frozenset({"mul", "div", "rmul"})
_ADD = frozenset({"add", "sub", "radd", "rsub"})


@dataclass(frozen=True)
class LossKind:
    """What was found, and the layer at which it was lost."""

    kind: str
    layer: str = ""


def loss_kind(graph: Graph) -> LossKind:
    """Classify a captured loss; its inputs are outputs and targets with the samples first."""
    twice = graph.with_batch(2 * graph.batch)
    kinds: dict[str, str] = {}
    lost = ""
    for layer in graph:
        if layer.kind is Kind.INPUT:
            kinds[layer.name] = SAMPLES
            continue
        kinds[layer.name] = _kind(layer, twice[layer.name], kinds, graph.batch)
        if kinds[layer.name] == OTHER and not lost:
            lost = layer.name
    kind = kinds[graph.output_names[0]]
    return LossKind(kind if kind in (MEAN, SUM) else OTHER, lost or graph.output_names[0])


def _kind(layer: Layer, twice: Layer, kinds: Mapping[str, str], batch: int) -> str:
    reads = [kinds[o.source] if o.origin is Source.VALUE else CONST for o in layer.operands]
    varying = {kind for kind in reads if kind != CONST}
    if not varying:
        return CONST
    if varying == {SAMPLES}:
        return of_samples(layer, kinds, batch)
    if len(varying) > 1 or OTHER in varying:
        return OTHER
    kind = varying.pop()
    if layer.op in _KEEP or (layer.op in ("sum", "mean") and layer.operands[0].spec.numel == 1):
        return kind
    if layer.op in _ADD and (kind == MEAN or not (CONST in reads or "numbers" in layer.attributes)):
        return kind
    if layer.op in _SCALE and reads.count(kind) == 1 and reads[0] == kind:
        return _scaled(layer, twice, kind)
    return OTHER


def of_samples(layer: Layer, kinds: Mapping[str, str], batch: int) -> str:
    """Tell what a layer makes of values per sample: values per sample again, their sum, mean or neither.

    Args:
        layer: a layer that reads values per sample, and maybe others.
        kinds: what is known of all values before it.
        batch: the number of samples.
    """
    reads = [o for o in layer.operands if o.origin is Source.VALUE and kinds[o.source] == SAMPLES]
    if layer.kind is Kind.LOSS:
        return _built_in(layer, reads)
    if layer.op in ("mean", "sum") and 0 in layer.attributes["dims"]:
        return MEAN if layer.op == "mean" else SUM
    if _opaque_by_sample(layer):
        follows = len({o.spec.shape[0] for o in reads}) == 1
    else:
        # One operand whose samples lie elsewhere, such as (n,) broadcast to (n, n), is beside other samples.
        follows = all(o.access and o.access[0].out == 0 for o in reads)
    return SAMPLES if follows and layer.shape and layer.shape[0] % batch == 0 else OTHER


def _built_in(layer: Layer, reads: Sequence[Operand]) -> str:
    """Tell what a built-in loss makes of values per sample."""
    if is_weighed(layer) or not _side_by_side(layer, reads):
        return OTHER
    if layer.attributes["reduction"] == "none":
        return SAMPLES
    # The runtime turns sums of losses that it takes apart into means.
    own_sum = layer.attributes["reduction"] == "sum" and not is_summed(layer)
    return SUM if own_sum else MEAN


def _side_by_side(layer: Layer, reads: Sequence[Operand]) -> bool:
    """Tell whether a built-in loss reads the samples of all operands along its first dimension."""
    shapes = [o.spec.shape for o in layer.operands]
    if layer.op in CLASSES:
        value, target, *_ = shapes
        by_class = len(value) > 1 and target in (value, (value[0], *value[2:]))
        return by_class and all(o in layer.operands[:2] for o in reads)
    # Elements are broadcast: their dimensions are counted from the last.
    ndim = max(map(len, shapes))
    return all(len(o.spec.shape) == ndim > 0 for o in reads) and len({o.spec.shape[0] for o in reads}) == 1


def _opaque_by_sample(layer: Layer) -> bool:
    """Tell whether a function that no split enters treats every sample alone."""
    if layer.op not in _ALONG or layer.call is None:
        return layer.op == "one_hot"
    dim = layer.call.kwargs.get("dim", next((a for a in layer.call.args if isinstance(a, int)), 0))
    return bool(dim % len(layer.shape))


def _scaled(layer: Layer, twice: Layer, kind: str) -> str:
    """Tell what a multiple is; a sum divided by the number of samples is a mean."""
    here, there = layer.attributes.get("numbers", ()), twice.attributes.get("numbers", ())
    if here == there:
        return kind
    grown = len(here) == len(there) == 1 and there[0] == 2 * here[0]
    return MEAN if kind == SUM and layer.op == "div" and grown else OTHER
