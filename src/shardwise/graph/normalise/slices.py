"""Regular parts of tensors: indexing, narrow, chunk, split; and picking from tuples."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.geometry.access import Axis, same
from shardwise.geometry.parts import Part
from shardwise.graph import functional
from shardwise.graph.errors import Opaque
from shardwise.graph.fake import Value
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.registry import rule
from shardwise.graph.normalise.reshape import reshape_layer
from shardwise.graph.site import Site


def slice_layer(
    site: Site,
    input: Value,
    starts: Sequence[int],
    stops: Sequence[int],
    steps: Sequence[int],
    suffix: str = "",
) -> Value:
    """Add the layer that cuts a regular part out of a value, unless that part is everything."""
    starts, stops, steps = tuple(starts), tuple(stops), tuple(steps)
    access = list(same(input.ndim))
    for d, n in enumerate(input.shape):
        if (starts[d], stops[d], steps[d]) != (0, n, 1):
            length = len(range(starts[d], stops[d], steps[d]))
            access[d] = Axis(d, Part(starts[d], length, steps[d]))
    if tuple(access) == same(input.ndim):
        return input
    return site.emit(
        functional.take,
        (input, starts, stops, steps),
        {},
        kind=Kind.RESHAPE,
        op="slice",
        reads=[("input", input, tuple(access))],
        attributes={"starts": starts, "stops": stops, "steps": steps},
        suffix=suffix,
    )


@rule("getitem", "__getitem__")
def getitem(site: Site, input: Any, index: Any) -> Any:
    """Describe `x[...]`; picking from a tuple or a shape is no layer."""
    if not isinstance(input, Value):
        return input[index]
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not isinstance(i, (int, slice)) and i is not None and i is not Ellipsis for i in items):
        raise Opaque("indexing with tensors or lists")
    if any(isinstance(i, bool) for i in items):
        raise Opaque("indexing with a truth value")
    used = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (input.ndim - used)
    starts, stops, steps, shape = [], [], [], []
    d = 0
    for item in items:
        if item is None:
            shape.append(1)
            continue
        if isinstance(item, int):
            start = item + input.shape[d] if item < 0 else item
            cut = (start, start + 1, 1)
        else:
            cut = item.indices(input.shape[d])
            cut = (cut[0], max(cut[0], cut[1]), cut[2])
            shape.append(len(range(*cut)))
        starts.append(cut[0])
        stops.append(cut[1])
        steps.append(cut[2])
        d += 1
    part = slice_layer(site, input, starts, stops, steps)
    return reshape_layer(site, part, shape, ".shape" if part is not input else "")


def along(site: Site, input: Value, dim: int, start: int, stop: int, step: int = 1) -> Value:
    """Cut `[start, stop)` out of one dimension."""
    starts, stops, steps = [0] * input.ndim, list(input.shape), [1] * input.ndim
    starts[dim], stops[dim], steps[dim] = start, stop, step
    return slice_layer(site, input, starts, stops, steps)


@rule("narrow")
def narrow(site: Site, input: Value, dim: int, start: int, length: int) -> Value:
    """Describe `narrow`."""
    dim %= input.ndim
    start += input.shape[dim] if start < 0 else 0
    return along(site, input, dim, start, start + length)


@rule("select", "aten.select", "select_copy")
def select(site: Site, input: Value, dim: int, index: int) -> Value:
    """Describe `select`."""
    dim %= input.ndim
    return getitem(site, input, (*(slice(None),) * dim, int(index)))  # type: ignore[no-any-return]


@rule("aten.slice", "slice_copy")
def aten_slice(
    site: Site, input: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    """Describe aten's slice of one dimension."""
    dim %= input.ndim
    begin, stop, step = slice(start, end, step).indices(input.shape[dim])
    return along(site, input, dim, begin, max(begin, stop), step)


def pieces(site: Site, input: Value, dim: int, sizes: Sequence[int]) -> tuple[Value, ...]:
    """Cut a dimension into consecutive pieces."""
    result, start = [], 0
    for size in sizes:
        result.append(along(site, input, dim, start, start + size))
        start += size
    return tuple(result)


@rule("chunk", "unsafe_chunk")
def chunk(site: Site, input: Value, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    """Describe `chunk`: all pieces but the last have the same length."""
    dim %= input.ndim
    n = input.shape[dim]
    size = max(1, -(-n // chunks))
    return pieces(site, input, dim, [min(size, n - i) for i in range(0, n, size)])


@rule("split", "split_with_sizes", "aten.split", "unsafe_split")
def split(site: Site, input: Value, split_size_or_sections: Any, dim: int = 0) -> tuple[Value, ...]:
    """Describe `split`."""
    dim %= input.ndim
    n, sizes = input.shape[dim], split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, n - i) for i in range(0, n, sizes)]
    return pieces(site, input, dim, sizes)


@rule("tensor_split")
def tensor_split(site: Site, input: Value, indices_or_sections: Any, dim: int = 0) -> tuple[Value, ...]:
    """Describe `tensor_split`."""
    dim %= input.ndim
    n, cuts = input.shape[dim], indices_or_sections
    if isinstance(cuts, int):
        base, extra = divmod(n, cuts)
        return pieces(site, input, dim, [base + (i < extra) for i in range(cuts)])
    if isinstance(cuts, Value):
        raise Opaque("tensor_split at positions in a tensor")
    bounds = [0, *(min(n, c) for c in cuts), n]
    return pieces(site, input, dim, [b - a for a, b in itertools.pairwise(bounds)])


@rule("unbind", "unbind_copy")
def unbind(site: Site, input: Value, dim: int = 0) -> tuple[Value, ...]:
    """Describe `unbind`."""
    dim %= input.ndim
    return tuple(select(site, input, dim, i) for i in range(input.shape[dim]))


@rule("iter")
def iterate(site: Site, input: Any) -> Any:
    """Describe iteration over the first dimension."""
    return iter(unbind(site, input)) if isinstance(input, Value) else iter(input)


@rule("getattr")
def attribute(site: Site, input: Any, name: str) -> Any:
    """Describe `x.shape`, `x.dtype`, `x.device` and the views that are written as attributes."""
    from shardwise.graph.layer import DEVICE
    from shardwise.graph.normalise.registry import apply_rule

    if not isinstance(input, Value):
        return getattr(input, name)
    if name == "shape":
        return torch.Size(input.shape)
    if name == "dtype":
        return getattr(torch, input.spec.dtype)
    if name == "device":
        return DEVICE
    if name == "ndim":
        return input.ndim
    if name == "requires_grad":
        return input.trained
    if name in {"T", "mT"}:
        return apply_rule(name, site, (input,), {})
    if name == "data":
        return apply_rule("detach", site, (input,), {})
    if name in {"is_cuda", "is_sparse", "is_quantized", "is_mps", "is_complex"}:
        return False
    raise Opaque(f"attribute {name!r} of a tensor")


@rule("size", "sym_size")
def size(site: Site, input: Value, dim: int | None = None) -> Any:
    """Describe `x.size()`: numbers, no layer."""
    return torch.Size(input.shape) if dim is None else input.shape[dim]


@rule("dim", "ndimension")
def ndimension(site: Site, input: Value) -> int:
    """Describe `x.dim()`."""
    return input.ndim


@rule("numel", "nelement", "sym_numel")
def numel(site: Site, input: Value) -> int:
    """Describe `x.numel()`."""
    return input.spec.numel


@rule("len")
def length(site: Site, input: Any) -> int:
    """Describe `len(x)`."""
    return input.shape[0] if isinstance(input, Value) else len(input)
