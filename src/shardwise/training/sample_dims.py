"""Where the samples of a value are: the factors that each of its dimensions is made of, outermost first.

    (8, 3, 4, 4) of 8 samples                   (8/1) (3) (4) (4)       n/s: n samples, s samples apart
    reshaped to (24, 16)                        (8/1 3) (16)            three frames of each sample in turn
    reshaped to (2, 4, 48)                      (2/4) (4/1) (48)        samples lie along two dimensions
    concatenated with itself: (16, 3, 4, 4)     (2 8/1) (3) (4) (4)     all samples, and all of them again

Factors that belong to no sample are 0 samples apart, so the same rule joins neighbours of either kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Factor = tuple[int, int]
"""How many elements, and how many samples apart they are."""
Dims = tuple[tuple[Factor, ...], ...]


def joined(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Join neighbours that count on, and leave factors of one out."""
    result: list[Factor] = []
    for size, apart in factors:
        if size == 1:
            continue
        if result and result[-1][1] == size * apart:
            size *= result.pop()[0]
        result.append((size, apart))
    return tuple(result)


def without_samples(shape: Sequence[int]) -> Dims:
    """Return the dimensions of a value that no sample has a part in."""
    return tuple(joined([(n, 0)]) for n in shape)


def samples_along(shape: Sequence[int], dim: int, samples: int) -> Dims:
    """Return the dimensions of a value whose samples follow each other along one dimension."""
    dims = list(without_samples(shape))
    dims[dim] = joined([(samples, 1), (shape[dim] // samples, 0)])
    return tuple(dims)


def carries(factors: Iterable[Factor]) -> bool:
    """Tell whether samples lie along a dimension."""
    return any(apart for _, apart in factors)


def regrouped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Return the dimensions after a reshape, which keeps the order of elements; None if they fall apart."""
    left = [factor for factors in dims for factor in factors]
    result = []
    for n in shape:
        taken: list[Factor] = []
        while (wanted := n // math.prod(size for size, _ in taken)) > 1:
            if not left:
                return None
            size, apart = left.pop(0)
            here = math.gcd(size, wanted)
            if here not in (size, wanted):
                return None
            taken.append((here, apart * (size // here)))
            if here < size:
                left.insert(0, (size // here, apart))
        result.append(joined(taken))
    return None if left else tuple(result)


def sliced(factors: Sequence[Factor], start: int, stop: int, step: int) -> tuple[Factor, ...] | None:
    """Return what a slice leaves of a dimension that samples lie along; None if it picks among samples."""
    outer = factors[0][0] if not factors[0][1] else 1
    inner = factors[-1][0] if not factors[-1][1] else 1
    n = math.prod(size for size, _ in factors)
    block = n // outer
    if step == 1 and start % block == stop % block == 0:
        return joined([((stop - start) // block, 0), *(factors[1:] if outer > 1 else factors)])
    if step == inner > start and len(range(start, stop, step)) == n // inner:
        return joined(factors[:-1])
    return None


def in_turn(parts: Sequence[Sequence[Factor]]) -> tuple[Factor, ...] | None:
    """Return a concatenation of dimensions that samples lie along; None if their samples differ."""
    outer = [part[0][0] if not part[0][1] else 1 for part in parts]
    rest = [tuple(part[1:] if n > 1 else part) for n, part in zip(outer, parts, strict=True)]
    if len(set(rest)) > 1 or not carries(rest[0]):
        return None
    return joined([(sum(outer), 0), *rest[0]])
