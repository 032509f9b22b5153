"""Rewrite built-in losses so that their counts are global: every rank makes sums, one ratio ends it.

    mean loss = numerator / denominator,  both summed over all samples and pixels of the mini-batch

The numerator and the denominator are the two elements of one small tensor; cutting the samples or pixels
gives partial sums of it, exactly like any other contraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.geometry.access import WHOLE
from shardwise.graph import Kind, Layer, Operand, Source, TensorSpec

TERMS = "loss_terms"
RATIO = "loss_ratio"


def expand_losses(layers: Sequence[Layer]) -> list[Layer]:
    """Replace every mean or sum loss by a layer that sums its terms and one that divides them."""
    result: list[Layer] = []
    for layer in layers:
        if layer.kind is Kind.LOSS and layer.attributes.get("reduction") in ("mean", "sum"):
            result += _expand(layer)
        else:
            result.append(layer)
    return result


def _expand(layer: Layer) -> list[Layer]:
    spec = TensorSpec((2,), layer.spec.dtype)
    terms = replace(
        layer,
        name=f"{layer.name}.terms",
        op=TERMS,
        attributes={**layer.attributes, "loss": layer.op},
        outputs=(spec,),
        operands=tuple(replace(o, access=(WHOLE,) * len(o.spec.shape)) for o in layer.operands),
        contracts=_contracts(layer),
    )
    ratio = replace(
        layer,
        op=RATIO,
        attributes={**layer.attributes, "empty": layer.operands[0].spec.numel == 0},
        operands=(Operand("input", terms.name, Source.VALUE, spec, (WHOLE,)),),
        contracts=(),
        call=None,
        forward_flops=0,
        backward_flops=0,
        saved_bytes=0,
    )
    return [terms, ratio]


def _contracts(layer: Layer) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Pair the dimensions of the input and of the target that can be cut together."""
    value, target = layer.operands[0], layer.operands[1]
    ndim = len(value.spec.shape)
    if layer.op not in ("cross_entropy", "nll_loss"):
        return tuple(((0, d), (1, d)) for d in range(ndim)) if value.spec.shape == target.spec.shape else ()
    if value.spec.shape == target.spec.shape:
        return tuple(((0, d), (1, d)) for d in range(ndim) if d != 1)
    return tuple(((0, d), (1, d - (d > 1))) for d in range(ndim) if d != 1)
