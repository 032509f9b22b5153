"""How the loss of a mini-batch follows from the losses of its shares.

    mean    L(all) = sum of (part of the samples) x L(share)        means, and built-in losses of any kind
    sum     L(all) = sum of L(share)                                 sums that the loss takes itself
    other   neither can be shown

Built-in losses count as means whatever they divide by, because the runtime corrects their denominators (but
not those of losses that divide by weights of single elements). A value is followed through the graph of the
loss: per sample, then summed or averaged over the samples, then only scaled and added.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.graph import Graph, Kind, Layer, Source
from shardwise.program.losses import is_weighed

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
        reads = [kinds[o.source] if o.origin is Source.VALUE else CONST for o in layer.operands]
        kinds[layer.name] = _kind(layer, twice[layer.name], reads, graph.batch)
        if kinds[layer.name] == OTHER and not lost:
            lost = layer.name
    kind = kinds[graph.output_names[0]]
    return LossKind(kind if kind in (MEAN, SUM) else OTHER, lost or graph.output_names[0])


def _kind(layer: Layer, twice: Layer, reads: list[str], batch: int) -> str:
    varying = {kind for kind in reads if kind != CONST}
    if not varying:
        return CONST
    if varying == {SAMPLES}:
        return of_samples(layer, batch)
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


def of_samples(layer: Layer, batch: int) -> str:
    """Tell what a layer makes of values per sample: values per sample again, their sum, mean or neither."""
    if layer.kind is Kind.LOSS:
        if is_weighed(layer):
            return OTHER
        return SAMPLES if layer.attributes.get("reduction") == "none" else MEAN
    if _opaque_by_sample(layer) and layer.shape[0] % batch == 0:
        return SAMPLES
    first = next(o for o in layer.operands if o.origin is Source.VALUE)
    if layer.op in ("mean", "sum") and 0 in layer.attributes["dims"]:
        return MEAN if layer.op == "mean" else SUM
    follows = bool(first.access) and first.access[0].out == 0
    return SAMPLES if follows and layer.shape and layer.shape[0] % batch == 0 else OTHER


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
