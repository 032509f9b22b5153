"""Matrix products: linear layers with weights, and products of two values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.geometry.access import WHOLE, Access, Axis
from shardwise.graph.errors import Opaque
from shardwise.graph.fake import Value
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.helpers import broadcast
from shardwise.graph.normalise.registry import rule
from shardwise.graph.site import Site


@rule("linear")
def linear(site: Site, input: Value, weight: Value, bias: Value | None = None) -> Value:
    """Describe `x @ weight.T + bias` over the last dimension."""
    last = input.ndim - 1
    ran = site.run(F.linear, input, weight, bias)
    flops = 2 * math.prod(ran.one.shape) * weight.shape[-1]
    reads: list[tuple[str, Value, Access]] = [
        ("input", input, (*(Axis(d) for d in range(last)), WHOLE)),
        ("weight", weight, (Axis(last), WHOLE)[2 - weight.ndim :]),
    ]
    if bias is not None:
        reads.append(("bias", bias, (Axis(last),)[: bias.ndim]))
    return site.add(
        ran,
        (F.linear, (input, weight, bias), {}),
        kind=Kind.LINEAR,
        op="linear",
        reads=reads,
        contracts=(((0, last), (1, weight.ndim - 1)),),
        flops=(flops, flops * (input.trained + weight.trained)),
    )


@rule("addmm")
def addmm(site: Site, input: Value, mat1: Value, mat2: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    """Leave `addmm` whole but for its rows."""
    if beta != 1 or alpha != 1:
        raise Opaque("addmm with factors")
    product = matmul(site, mat1, mat2)
    ran = site.run(torch.add, product, input)
    reads = [("input", product, broadcast(product.shape, ran.one.shape))]
    reads.append(("other", input, broadcast(input.shape, ran.one.shape)))
    kind = Kind.JOIN if input.origin == "value" else Kind.ELEMENTWISE
    return site.add(ran, (torch.add, (product, input), {}), kind=kind, op="add", reads=reads, suffix=".add")


@rule("matmul", "bmm", "mm", "__matmul__", "mv", "dot")
def matmul(site: Site, input: Value, other: Value) -> Value:
    """Describe a matrix product of two values, batch dimensions broadcast."""
    if input.ndim < 2 or other.ndim < 2:
        raise Opaque("a product with a vector")
    ran = site.run(torch.matmul, input, other)
    out = ran.one.shape
    last = len(out) - 1
    flops = 2 * math.prod(out) * input.shape[-1]
    return site.add(
        ran,
        (torch.matmul, (input, other), {}),
        kind=Kind.LINEAR,
        op="matmul",
        reads=[
            ("input", input, (*broadcast(input.shape[:-2], out[:-2]), Axis(last - 1), WHOLE)),
            ("other", other, (*broadcast(other.shape[:-2], out[:-2]), WHOLE, Axis(last))),
        ],
        contracts=(((0, input.ndim - 1), (1, other.ndim - 2)),),
        flops=(flops, flops * (input.trained + other.trained)),
    )


@rule("einsum")
def einsum(site: Site, equation: str, *operands: Any) -> Value:
    """Describe an einsum with plain letters: letters of the output are tied, the others summed."""
    values = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    terms, arrow, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if not arrow or "." in equation or any(len(set(t)) != len(t) for t in letters):
        raise Opaque(f"einsum {equation!r}")
    extent = {c: n for t, v in zip(letters, values, strict=True) for c, n in zip(t, v.shape, strict=True)}
    flops = 2 * math.prod(extent.values()) if len(values) > 1 else 0
    places = [(c, [(i, t.index(c)) for i, t in enumerate(letters) if c in t]) for c in extent]
    return site.emit(
        torch.einsum,
        (equation, *values),
        {},
        kind=Kind.LINEAR,
        op="einsum",
        reads=[
            (f"input{i}", v, tuple(Axis(result.index(c)) if c in result else WHOLE for c in t))
            for i, (t, v) in enumerate(zip(letters, values, strict=True))
        ],
        attributes={"equation": equation},
        contracts=tuple(tuple(where) for c, where in places if c not in result),
        flops=(flops, flops * sum(v.trained for v in values)),
    )


@rule("scaled_dot_product_attention")
def attention(site: Site, query: Value, key: Value, value: Value, *args: Any, **kwargs: Any) -> Value:
    """Describe attention: batch and heads are independent, positions are not."""
    if args or kwargs.get("attn_mask") is not None or kwargs.get("dropout_p"):
        raise Opaque("attention with a mask or dropout")
    tied = query.ndim - 2
    access = (*(Axis(d) for d in range(tied)), WHOLE, WHOLE)
    flops = 2 * math.prod(query.shape) * key.shape[-2] + 2 * math.prod(query.shape[:-1]) * math.prod(
        value.shape[-2:]
    )
    return site.emit(
        F.scaled_dot_product_attention,
        (query, key, value),
        kwargs,
        kind=Kind.OTHER,
        op="attention",
        reads=[("input0", query, access), ("input1", key, access), ("input2", value, access)],
        flops=(flops, flops * 5 // 2 * any(v.trained for v in (query, key, value))),
        reason="every position reads every other",
    )


@rule("embedding")
def embedding(
    site: Site,
    input: Value,
    weight: Value,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    """Describe a table lookup."""
    if max_norm is not None or sparse or scale_grad_by_freq or weight.spec.dtype.startswith("int"):
        raise Opaque("an embedding that renormalises or has sparse gradients")
    if not input.spec.dtype.startswith("int"):
        input, weight = weight, input  # aten has the table first
    padding_idx = None if padding_idx is None or padding_idx < 0 else padding_idx
    return site.emit(
        F.embedding,
        (input, weight),
        {"padding_idx": padding_idx},
        kind=Kind.OTHER,
        op="embedding",
        reads=[
            ("input0", input, tuple(Axis(d) for d in range(input.ndim))),
            ("weight", weight, (WHOLE, Axis(input.ndim))),
        ],
        attributes={"padding_idx": padding_idx},
        reason="a table lookup",
    )
