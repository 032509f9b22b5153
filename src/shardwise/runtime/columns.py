"""What batch norm does to each channel of a tensor, in one pass over it each.

torch has no single operator for these passes: composed of several, each reads and writes the whole tensor
anew, and statistics take as long as a small convolution. `columns.c` has them as loops. It is compiled when
shardwise is installed; without a compiler, on accelerators, and for ranks with several threads torch's own
operators do the same.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

SETTING = "SHARDWISE_NATIVE"
_TYPES = {torch.float32: "float32", torch.float64: "float64"}
_NEWEST = "gated_combine_last_float64"
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def moments(x: Tensor) -> Tensor:
    """Return (3, channels): sums, and what parts of the tensor add to a variance.

    With n values, mean m and centred squares q of each part the rows are the sums of n*m, q and n*m*m.
    """
    channels = x.shape[1]
    found = _order(x)
    if found is not None:
        sums = torch.empty((3, channels), dtype=torch.float64)
        _call("moments", found, x.dtype, [x], [sums])
        return sums
    if not x.numel():
        return torch.zeros((3, channels), dtype=torch.float64, device=x.device)
    dims, count = (0, *range(2, x.ndim)), x.numel() // channels
    mean = x.mean(dims, dtype=wide_enough(x.dtype))
    centred = x - spread(mean, x)
    wide = mean.double()
    return torch.stack((wide * count, centred.square_().sum(dims).double(), wide * wide * count))


def affine(
    x: Tensor, scale: Tensor, shift: Tensor, rectify: bool = False, place: Tensor | None = None
) -> Tensor:
    """Return x * scale + shift, nothing less than zero if it shall `rectify`, in a place if one is given."""
    if not x.numel():
        return torch.empty_like(x) if place is None else place
    found = _order(x)
    if found is not None and (place is None or (found[0] == "last" and place[0].stride() == x[0].stride())):
        result = torch.empty_like(x) if place is None else place
        factors = [scale.to(x.dtype), shift.to(x.dtype)]
        name = "rectified" if rectify else "affine"
        # A place in a wider tensor has gaps between its samples, but none inside.
        pairs = [(x, result)] if place is None else list(zip(x, place, strict=True))
        sizes = found[1] if place is None else (found[1][0] // len(pairs), found[1][1])
        for source, target in pairs:
            _call(name, (found[0], sizes), x.dtype, [source], [*factors, target])
        return result
    if found is not None:
        result = affine(x, scale, shift)
    else:
        # A norm with mean zero and variance one, in torch's own single pass; 16 bits would round the shift.
        kind = wide_enough(x.dtype)
        one = torch.ones_like(scale, dtype=kind)
        result = torch.nn.functional.batch_norm(
            x, one * 0, one, scale.to(kind), shift.to(kind), False, 0.0, 0.0
        )
    if place is None:
        return result.relu_() if rectify else result
    return torch.clamp_min(result, 0, out=place) if rectify else place.copy_(result)


def products(gradient: Tensor, x: Tensor, mean: Tensor, gate: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Return (2, channels): the sums of the gradient, and of its product with the centred x.

    With a `gate` (scale and shift) only where x * scale + shift is larger than zero; this is for tensors that
    have a compiled pass.
    """
    found = _order(x)
    if found is not None:
        sums = torch.empty((2, x.shape[1]), dtype=torch.float64)
        read = [_alike(gradient, x), x]
        _call("products", found, x.dtype, read, [mean.to(x.dtype), sums], gate)
        return sums
    assert gate is None
    if not x.numel():
        return torch.zeros((2, x.shape[1]), dtype=torch.float64, device=x.device)
    # With a variance of one and no epsilon this is what backward of a norm with fixed statistics sums up.
    _, second, first = torch.ops.aten.native_batch_norm_backward(
        gradient, x, None, mean, torch.ones_like(mean), None, None, False, 0.0, [False, True, True]
    )
    return torch.stack((first, second)).double()


def combine(
    gradient: Tensor,
    x: Tensor,
    scale: Tensor,
    slope: Tensor,
    offset: Tensor,
    own: bool,
    gate: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return gradient * scale - x * slope - offset, in the gradient's place if that is our `own`.

    A `gate` is as in `products`.
    """
    factors = [t.to(x.dtype) for t in (scale, slope, offset)]
    found = _order(x)
    if found is not None:
        read = _alike(gradient, x)
        result = read if own or read is not gradient else torch.empty_like(x)
        _call("combine", found, x.dtype, [read, x], [*factors, result], gate)
        return result
    assert gate is None
    scale, slope, offset = (spread(t, x) for t in factors)
    result = gradient.mul_(scale) if own else gradient * scale
    return result.addcmul_(x, slope, value=-1.0).sub_(offset)


def one_pass(x: Tensor) -> bool:
    """Tell whether there is a compiled pass for a tensor."""
    return _order(x) is not None


def spread(row: Tensor, x: Tensor) -> Tensor:
    """Give a value per channel the dimensions of `x`."""
    return row.view(1, -1, *(1,) * (x.ndim - 2))


def wide_enough(dtype: torch.dtype) -> torch.dtype:
    """Return what statistics are taken in: 16 bits would round a mean before it is subtracted."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def native() -> bool:
    """Tell whether the compiled passes are used by this process."""
    return _library() is not None and torch.get_num_threads() == 1 and os.environ.get(SETTING) != "0"


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    found = importlib.util.find_spec("shardwise.runtime._columns")
    library = None if found is None or found.origin is None else ctypes.CDLL(found.origin)
    # One that was compiled before this file was changed does not have them all.
    return library if library is not None and getattr(library, _NEWEST, None) is not None else None


@lru_cache(maxsize=64)
def _function(name: str, pointers: tuple[int, int], order: str, dtype: torch.dtype) -> Any:
    """Return a function that takes tensors, sizes, and tensors again."""
    function = getattr(_library(), f"{name}_{order}_{_TYPES[dtype]}")
    sizes = 3 if order == "first" else 2
    before, after = pointers
    kinds = [ctypes.c_void_p] * before + [ctypes.c_ssize_t] * sizes + [ctypes.c_void_p] * after
    function.argtypes, function.restype = kinds, None
    return function


def _order(x: Tensor) -> tuple[str, tuple[int, ...]] | None:
    """Return how a tensor lies in memory and its sizes, if there is a compiled pass for it."""
    if not x.is_cpu or x.dtype not in _TYPES or not x.numel() or not native():
        return None
    n, c, m = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    if m > 1 and x.is_contiguous():
        return "first", (n, c, m)
    form = _FORMATS.get(x.ndim)
    if (m == 1 and x.is_contiguous()) or (form is not None and x.is_contiguous(memory_format=form)):
        return "last", (n * m, c)
    return None


def _alike(gradient: Tensor, x: Tensor) -> Tensor:
    """Return a gradient in the memory order of `x`."""
    if gradient.stride() == x.stride():
        return gradient
    form = torch.contiguous_format if x.is_contiguous() else _FORMATS[x.ndim]
    return gradient.contiguous(memory_format=form)


def _call(
    name: str,
    order: tuple[str, tuple[int, ...]],
    dtype: torch.dtype,
    before: list[Tensor],
    after: list[Tensor],
    gate: tuple[Tensor, Tensor] | None = None,
) -> None:
    where, sizes = order
    if where == "last" and name in ("moments", "products"):
        after = [*after, torch.empty(2 * sizes[1], dtype=dtype)]
    if gate is not None:
        name, after = f"gated_{name}", [*after, *(t.to(dtype) for t in gate)]
    function = _function(name, (len(before), len(after)), where, dtype)
    function(*(t.data_ptr() for t in before), *sizes, *(t.data_ptr() for t in after))
