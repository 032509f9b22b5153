"""Rewrite built-in losses so that their counts are global: every rank makes sums, one ratio ends it.

    mean loss = numerator / denominator,  both summed over all samples and pixels of the mini-batch

The numerator and the denominator are the two elements of one small tensor; cutting the samples or pixels
gives partial sums of it, exactly like any other contraction. A loss without reduction is elementwise.

Where the mini-batch is shared out over replicas or micro-batches, a share must not divide by a count of its
own. The loss of a share is weighted with its part of the samples, so its numerator is multiplied by

    1 / (global denominator x part of the samples)        mean over the class targets that count
    1 / part of the samples                               sum

a number that only the runtime knows: it is read as a buffer, `<layer>.scale`. All other means have
denominators in proportion to the samples and need no correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.geometry.access import WHOLE, Access, Axis
from shardwise.graph import Kind, Layer, Operand, Source, TensorSpec

TERMS = "loss_terms"
RATIO = "loss_ratio"
CLASSES = ("cross_entropy", "nll_loss")
"""Losses that read all classes of a pixel at once."""
PLAIN = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
"""Losses of single elements."""
WEIGHED = ("mse_loss", "l1_loss")
"""Losses of single elements whose mean, given weights, is divided by the sum of these."""

Contracts = tuple[tuple[tuple[int, int], ...], ...]


def expand_losses(layers: Sequence[Layer], *, shared: bool = False) -> list[Layer]:
    """Replace every mean or sum loss by a layer that sums its terms and one that divides them.

    Args:
        layers: the layers of a stage.
        shared: whether other replicas or micro-batches have shares of the same mini-batch.
    """
    result: list[Layer] = []
    for layer in layers:
        known, reduction = _is_known(layer), layer.attributes.get("reduction")
        if known and reduction in ("mean", "sum", "batchmean"):
            result += _expand(layer, shared and (is_counted(layer) or is_summed(layer)))
        elif known and reduction == "none":
            result.append(_elementwise(layer))
        else:
            result.append(layer)
    return result


def is_counted(layer: Layer) -> bool:
    """Tell whether a loss divides by the targets that count, with their weights: known from the data only."""
    mean = _is_known(layer) and layer.attributes.get("reduction") == "mean"
    return mean and layer.op in CLASSES and not layer.operands[1].spec.is_float


def is_weighed(layer: Layer) -> bool:
    """Tell whether a loss divides by the sum of the weights of its elements."""
    mean = layer.kind is Kind.LOSS and layer.attributes.get("reduction") == "mean"
    return mean and layer.op in WEIGHED and any(o.role == "weight" for o in layer.operands)


def is_summed(layer: Layer) -> bool:
    """Tell whether a loss is the sum over all samples."""
    return _is_known(layer) and layer.attributes.get("reduction") == "sum"


def scale_name(layer: str) -> str:
    """Return the name of the number that corrects a loss of a share."""
    return f"{layer}.scale"


def _is_known(layer: Layer) -> bool:
    return layer.kind is Kind.LOSS and layer.op in (*CLASSES, *PLAIN) and _aligned(layer)


def _aligned(layer: Layer) -> bool:
    """Tell whether the dimensions of input and target belong together one by one."""
    value, target = layer.operands[0].spec.shape, layer.operands[1].spec.shape
    if layer.op not in CLASSES:
        return value == target
    return len(value) > 1 and target in (value, (value[0], *value[2:]))


def _expand(layer: Layer, scaled: bool) -> list[Layer]:
    # In 16 bits a sum over the pixels of an image overflows, and a count stops growing.
    narrow = layer.spec.dtype in ("float16", "bfloat16")
    spec = TensorSpec((2,), "float32" if narrow else layer.spec.dtype)
    terms = replace(
        layer,
        name=f"{layer.name}.terms",
        op=TERMS,
        attributes={**layer.attributes, "loss": layer.op},
        outputs=(spec,),
        operands=tuple(replace(o, access=(WHOLE,) * len(o.spec.shape)) for o in layer.operands),
        contracts=_contracts(layer),
    )
    operands = [Operand("input", terms.name, Source.VALUE, spec, (WHOLE,))]
    if scaled:
        number = TensorSpec((), spec.dtype)
        operands.append(Operand("scale", scale_name(layer.name), Source.BUFFER, number, ()))
    ratio = replace(
        layer,
        op=RATIO,
        attributes={
            **layer.attributes,
            "empty": layer.operands[0].spec.numel == 0,
            "samples": layer.operands[0].spec.shape[0] if layer.operands[0].spec.shape else 1,
        },
        operands=tuple(operands),
        contracts=(),
        call=None,
        forward_flops=0,
        backward_flops=0,
        saved_bytes=0,
    )
    return [terms, ratio]


def _contracts(layer: Layer) -> Contracts:
    """List the dimensions of the input that can be cut, each with those of the other operands."""
    value = layer.operands[0]
    groups = []
    for dim, n in enumerate(value.spec.shape):
        pairs = [_place(layer, i, dim) for i in range(len(layer.operands))]
        if pairs[1] is None:
            continue
        # A weight that is part of the model is held whole; so is what it would have to be cut with.
        fixed = any(
            place is not None and o.origin is not Source.VALUE and o.spec.shape[place] == n > 1
            for place, o in zip(pairs, layer.operands, strict=True)
        )
        if not fixed:
            groups.append(tuple((i, p) for i, p in enumerate(pairs) if p is not None))
    return tuple(groups)


def _place(layer: Layer, index: int, dim: int) -> int | None:
    """Return which dimension of an operand goes along with dimension `dim` of the input, if it has one."""
    shape, value = layer.operands[index].spec.shape, layer.operands[0].spec.shape
    if index == 0:
        return dim
    if layer.op in CLASSES:
        if dim == 1 or index > 1:
            return None
        return dim if shape == value else dim - (dim > 1)
    # Weights are broadcast: their dimensions are counted from the last.
    place = dim - (len(value) - len(shape))
    return place if place >= 0 and shape[place] == value[dim] else None


def _elementwise(layer: Layer) -> Layer:
    """Describe a loss without reduction: one number per element, or per pixel where it reads classes."""
    by_class = layer.op in CLASSES
    ndim = len(layer.operands[0].spec.shape)
    outs = [None if by_class and d == 1 else d - (by_class and d > 1) for d in range(ndim)]

    def access(index: int, operand: Operand) -> Access:
        found: list[Axis] = [WHOLE] * len(operand.spec.shape)
        for dim, out in enumerate(outs):
            place = _place(layer, index, dim)
            if out is not None and place is not None:
                found[place] = Axis(out)
        return tuple(found)

    operands = tuple(replace(o, access=access(i, o)) for i, o in enumerate(layer.operands))
    return replace(layer, operands=operands)
