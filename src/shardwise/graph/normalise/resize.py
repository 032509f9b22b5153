"""Interpolation: nearest, linear and cubic; "area" is adaptive pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import functional as F

from shardwise.geometry.access import Axis
from shardwise.geometry.resize import Resize
from shardwise.graph.canonical import name_of
from shardwise.graph.errors import Opaque
from shardwise.graph.fake import Value
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.helpers import each
from shardwise.graph.normalise.registry import rule
from shardwise.graph.site import Site

_MODES = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}
_TORCH = {
    ("linear", 1): "linear",
    ("linear", 2): "bilinear",
    ("linear", 3): "trilinear",
    ("cubic", 2): "bicubic",
}


@rule("interpolate", "upsample")
def interpolate(
    site: Site,
    input: Value,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Value:
    """Describe `F.interpolate`."""
    nd = input.ndim - 2
    mode = _MODES.get(mode, mode)
    if antialias or mode not in ("nearest", "nearest-exact", "linear", "cubic"):
        raise Opaque(f"interpolation mode {mode!r}{' with antialias' if antialias else ''}")
    scale: tuple[float, ...] | None = None
    if size is None:
        factors = tuple(float(f) for f in each(scale_factor, nd))
        sizes = tuple(int(n * f) for n, f in zip(input.shape[2:], factors, strict=True))
        scale = None if recompute_scale_factor else factors
    else:
        sizes = tuple(int(n) for n in each(size, nd))
    return _resize(site, input, mode, sizes, bool(align_corners), scale)


def _resize(
    site: Site,
    input: Value,
    mode: str,
    sizes: tuple[int, ...],
    align: bool,
    scale: tuple[float, ...] | None,
) -> Value:
    nd = input.ndim - 2
    maps = [Resize(sizes[d], mode, align, None if scale is None else scale[d]) for d in range(nd)]
    kwargs: dict[str, Any] = {"mode": _TORCH.get((mode, nd), mode)}
    kwargs |= {"size": sizes} if scale is None else {"scale_factor": scale}
    if mode in ("linear", "cubic"):
        kwargs["align_corners"] = align
    return site.emit(
        F.interpolate,
        (input,),
        kwargs,
        kind=Kind.RESIZE,
        op="resize",
        reads=[("input", input, (Axis(0), Axis(1), *(Axis(d + 2, maps[d]) for d in range(nd))))],
        attributes={"nd": nd, "mode": mode, "size": sizes, "align_corners": align, "scale": scale},
    )


@rule(*(f"{name}{nd}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for nd in (1, 2, 3)))
def aten_nearest(site: Site, input: Value, output_size: Any, *scales: Any) -> Value:
    """Describe aten's nearest interpolation."""
    mode = "nearest-exact" if "exact" in name_of(site.step.target) else "nearest"
    return _aten(site, input, mode, output_size, False, scales)


@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")
def aten_linear(site: Site, input: Value, output_size: Any, align_corners: bool, *scales: Any) -> Value:
    """Describe aten's linear and cubic interpolation."""
    mode = "cubic" if "cubic" in name_of(site.step.target) else "linear"
    return _aten(site, input, mode, output_size, align_corners, scales)


def _aten(site: Site, input: Value, mode: str, output_size: Any, align: bool, scales: Sequence[Any]) -> Value:
    factors: Any = scales[0] if len(scales) == 1 and isinstance(scales[0], (tuple, list)) else scales
    scale = None if not factors or None in factors else tuple(float(f) for f in factors)
    if output_size is None:
        if scale is None:
            raise Opaque("interpolation without a size")
        sizes = tuple(int(n * f) for n, f in zip(input.shape[2:], scale, strict=True))
    else:
        sizes = tuple(int(n) for n in output_size)
    return _resize(site, input, mode, sizes, align, scale)
