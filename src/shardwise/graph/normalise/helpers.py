"""Small arithmetic shared by the rules: argument forms and common accesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.geometry.access import WHOLE, Access, Axis
from shardwise.graph.errors import Opaque
from shardwise.graph.fake import Value


def each(value: Any, nd: int) -> tuple[Any, ...]:
    """Return a setting per dimension: a single number counts for all of them."""
    if isinstance(value, (tuple, list)):
        items = tuple(value)
        return items if len(items) == nd else items * nd if len(items) == 1 else items
    return (value,) * nd


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """Return dimensions as non-negative numbers in order; None or an empty list means all of them."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    items = dim if isinstance(dim, (tuple, list)) else (dim,)
    return tuple(sorted(d % max(1, ndim) for d in items))


def broadcast(shape: Sequence[int], out: Sequence[int]) -> Access:
    """Return how an operand of `shape` is read when it is broadcast to `out`."""
    first = len(out) - len(shape)
    return tuple(WHOLE if n == 1 and out[first + d] != 1 else Axis(first + d) for d, n in enumerate(shape))


def reduced(ndim: int, dims: Sequence[int], keepdim: bool) -> Access:
    """Return how a reduction over `dims` reads its input."""
    access: list[Axis] = []
    at = 0
    for d in range(ndim):
        if d in dims:
            access.append(WHOLE)
            at += keepdim
        else:
            access.append(Axis(at))
            at += 1
    return tuple(access)


def reshaped(shape: Sequence[int], out: Sequence[int]) -> Access:
    """Return how a reshape reads its input: dimensions that survive are tied, the others read whole.

    Elements keep their row-major order, so both shapes fall apart into groups of dimensions with equal
    products; a dimension survives if it is alone (but for ones) in its group on both sides.
    """
    access = [WHOLE] * len(shape)
    i = j = 0
    while i < len(shape) and j < len(out):
        left, right, a, b = [i], [j], shape[i], out[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(shape):
                left.append(i)
                a, i = a * shape[i], i + 1
            elif j < len(out):
                right.append(j)
                b, j = b * out[j], j + 1
            else:
                return tuple(access)
        real_left = [d for d in left if shape[d] != 1]
        real_right = [d for d in right if out[d] != 1]
        if len(real_left) == len(real_right) == 1:
            access[real_left[0]] = Axis(real_right[0])
        elif not real_left and not real_right and left[0] == right[0] == 0:
            # A batch of one sample is still the batch.
            access[0] = Axis(0)
    return tuple(access)


def tensor(value: Any, what: str) -> Value:
    """Return an argument that must be a tensor."""
    if not isinstance(value, Value):
        raise Opaque(f"{what} is not a tensor")
    return value


def spatial(ndim: int, nd: int, what: str) -> None:
    """Refuse inputs without a batch dimension: their dimensions mean something else."""
    if ndim != nd + 2:
        raise Opaque(f"{what} of a {ndim}-D tensor without a batch dimension")
