"""Pooling with windows, and adaptive pooling."""

from __future__ import annotations

import math
from typing import Any

from torch.nn import functional as F

from shardwise.geometry.access import Axis
from shardwise.geometry.adaptive import Adaptive
from shardwise.geometry.axes import Window
from shardwise.graph.errors import Opaque
from shardwise.graph.fake import Value
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.helpers import each, reduced, spatial
from shardwise.graph.normalise.registry import rule
from shardwise.graph.site import Site

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE: dict[tuple[str, int], Any] = {
    (kind, nd): getattr(F, f"adaptive_{kind}_pool{nd}d") for kind in ("avg", "max") for nd in (1, 2, 3)
}


def _nd(site: Site) -> int:
    name = str(getattr(site.step.target, "__name__", ""))
    return next(nd for nd in (1, 2, 3) if f"{nd}d" in name)


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(
    site: Site,
    input: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Value:
    """Describe max pooling."""
    nd = _nd(site)
    if return_indices:
        raise Opaque("max pooling that returns indices: they are positions in the whole image")
    kernel = each(kernel_size, nd)
    stride = each(stride, nd) if stride not in (None, [], ()) else kernel
    padding, dilation = each(padding, nd), each(dilation, nd)
    kwargs = {"ceil_mode": ceil_mode}
    args = (input, kernel, stride, padding, dilation)
    return _pool(site, "max_pool", nd, _MAX[nd], args, kwargs, kernel, stride, padding, dilation, ceil_mode)


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    site: Site,
    input: Value,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """Describe average pooling."""
    nd = _nd(site)
    kernel = each(kernel_size, nd)
    stride = each(stride, nd) if stride not in (None, [], ()) else kernel
    padding = each(padding, nd)
    args = (input, kernel, stride, padding, ceil_mode, count_include_pad)
    kwargs = {} if nd == 1 else {"divisor_override": divisor_override}
    more = {"count_include_pad": count_include_pad, "divisor": divisor_override}
    return _pool(
        site, "avg_pool", nd, _AVG[nd], args, kwargs, kernel, stride, padding, (1,) * nd, ceil_mode, more
    )


def _pool(
    site: Site,
    op: str,
    nd: int,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
    more: dict[str, Any] | None = None,
) -> Value:
    input: Value = args[0]
    spatial(input.ndim, nd, op)
    windows = [
        Window(kernel[d], stride[d], padding[d], padding[d], dilation[d], ceil_mode) for d in range(nd)
    ]
    access = (Axis(0), Axis(1), *(Axis(d + 2, windows[d]) for d in range(nd)))
    settings = {
        "nd": nd,
        "kernel": kernel,
        "stride": stride,
        "padding": tuple((p, p) for p in padding),
        "dilation": dilation,
        "ceil_mode": ceil_mode,
        "count_include_pad": True,
        "divisor": None,
    }
    return site.emit(
        target,
        args,
        kwargs,
        kind=Kind.POOLING,
        op=op,
        reads=[("input", input, access)],
        attributes=settings | (more or {}),
    )


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_avg_pool(site: Site, input: Value, output_size: Any) -> Value:
    """Describe adaptive average pooling; to a single pixel it is a mean."""
    return _adaptive(site, input, output_size, "avg")


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(site: Site, input: Value, output_size: Any, return_indices: bool = False) -> Value:
    """Describe adaptive max pooling."""
    if return_indices:
        raise Opaque("max pooling that returns indices: they are positions in the whole image")
    return _adaptive(site, input, output_size, "max")


def _adaptive(site: Site, input: Value, output_size: Any, which: str) -> Value:
    nd = _nd(site)
    spatial(input.ndim, nd, f"adaptive {which} pooling")
    sizes = tuple(input.shape[2 + d] if n is None else int(n) for d, n in enumerate(each(output_size, nd)))
    target = _ADAPTIVE[which, nd]
    if which == "avg" and math.prod(sizes) == 1:
        dims = tuple(range(2, input.ndim))
        return site.emit(
            target,
            (input, sizes),
            {},
            kind=Kind.POOLING,
            op="mean",
            reads=[("input", input, reduced(input.ndim, dims, keepdim=True))],
            attributes={"dims": dims, "keepdim": True},
            contracts=tuple(((0, d),) for d in dims),
        )
    maps = (Axis(d + 2, Adaptive(sizes[d])) for d in range(nd))
    return site.emit(
        target,
        (input, sizes),
        {},
        kind=Kind.POOLING,
        op=f"adaptive_{which}_pool",
        reads=[("input", input, (Axis(0), Axis(1), *maps))],
        attributes={"nd": nd, "output_size": sizes},
    )
