"""Reductions: sums and means can be cut, others read their dimensions whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.graph import functional
from shardwise.graph.canonical import name_of
from shardwise.graph.errors import Opaque
from shardwise.graph.fake import Value
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.helpers import dims_of, reduced
from shardwise.graph.normalise.registry import rule
from shardwise.graph.site import Site


def _reduce(
    site: Site, op: str, target: Any, input: Value, dim: Any, keepdim: bool, settings: Mapping[str, Any]
) -> Value:
    summed = op in ("mean", "sum")
    dims = dims_of(dim, input.ndim)
    over_pixels = summed and input.ndim > 2 and dims == tuple(range(2, input.ndim))
    return site.emit(
        target,
        (input,),
        settings,
        kind=Kind.POOLING if over_pixels else Kind.REDUCTION,
        op=op,
        reads=[("input", input, reduced(input.ndim, dims, keepdim))],
        attributes={"dims": dims, "keepdim": keepdim},
        contracts=tuple(((0, d),) for d in dims) if summed else (),
    )


@rule("mean", "sum")
def mean(site: Site, input: Value, dim: Any = None, keepdim: Any = False, *, dtype: Any = None) -> Value:
    """Describe a sum or a mean, over given or over all dimensions."""
    name = name_of(site.step.target)
    if isinstance(dim, torch.dtype) or not isinstance(keepdim, bool):
        raise Opaque(f"this form of {name}")
    settings: dict[str, Any] = {"dim": dims_of(dim, input.ndim), "keepdim": keepdim} if input.ndim else {}
    if dtype is not None:
        settings["dtype"] = dtype
    target = torch.mean if name == "mean" else torch.sum
    return _reduce(site, name, target, input, dim, keepdim, settings)


@rule("amax", "amin")
def amax(site: Site, input: Value, dim: Any = (), keepdim: bool = False) -> Value:
    """Describe the largest or smallest value over dimensions."""
    name = name_of(site.step.target)
    settings = {"dim": dims_of(dim, input.ndim), "keepdim": keepdim}
    return _reduce(site, name, getattr(torch, name), input, dim, keepdim, settings)


class Extreme(tuple[Any, ...]):
    """Values and indices of `max` along a dimension, by position or by name like torch's own result."""

    @property
    def values(self) -> Any:
        """Return the largest (or smallest) values."""
        return self[0]

    @property
    def indices(self) -> Any:
        """Return where they are."""
        return self[1]


@rule("max", "min")
def extreme(site: Site, input: Value, dim: Any = None, keepdim: bool = False) -> Any:
    """Describe `max`: over everything, or along a dimension (values and positions)."""
    name = name_of(site.step.target)
    if isinstance(dim, Value):
        raise Opaque(f"{name} of two tensors")
    if dim is None:
        return _reduce(site, name, getattr(torch, name), input, None, False, {})
    settings = {"dim": dims_of(dim, input.ndim)[0], "keepdim": keepdim}
    value = functional.largest if name == "max" else functional.smallest
    values = _reduce(site, name, value, input, dim, keepdim, settings)
    positions = _reduce(site, f"arg{name}", getattr(torch, f"arg{name}"), input, dim, keepdim, settings)
    return Extreme((values, positions))


@rule("var", "std", "logsumexp", "argmax", "argmin", "all", "any", "prod")
def whole(site: Site, input: Value, dim: Any = None, keepdim: Any = False, **settings: Any) -> Value:
    """Describe a reduction that cannot be summed up from parts: it reads its dimensions whole."""
    name = name_of(site.step.target)
    if isinstance(dim, bool) or not isinstance(keepdim, bool) or (keepdim and name in ("var", "std")):
        raise Opaque(f"this form of {name}")
    if dim is not None:
        single = name in ("argmax", "argmin", "prod")
        dims = dims_of(dim, input.ndim)
        settings = {**settings, "dim": dims[0] if single else dims, "keepdim": keepdim}
    return _reduce(site, name, getattr(torch, name), input, dim, keepdim and dim is not None, settings)
