"""Layers that move elements without computing: reshape, permute, slice, pad, pixel shuffle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.geometry.access import WHOLE, Axis, same
from shardwise.geometry.padding import Padded
from shardwise.geometry.parts import Scaled
from shardwise.graph import functional
from shardwise.graph.errors import Opaque
from shardwise.graph.fake import Value
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.helpers import broadcast, each, reshaped
from shardwise.graph.normalise.registry import rule
from shardwise.graph.site import Site

Pads = Sequence[tuple[int, int]]


def reshape_layer(site: Site, input: Value, shape: Sequence[int], suffix: str = "") -> Value:
    """Add a reshape, unless the shape is already right."""
    shape = tuple(int(n) for n in shape)
    if shape == input.shape:
        return input
    return site.emit(
        functional.reshape,
        (input, shape),
        {},
        kind=Kind.RESHAPE,
        op="reshape",
        reads=[("input", input, reshaped(input.shape, shape))],
        attributes={"shape": shape},
        suffix=suffix,
    )


@rule("reshape", "view", "_unsafe_view", "view_copy")
def reshape(site: Site, input: Value, *shape: Any) -> Value:
    """Describe `reshape` and `view`."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise Opaque("view as another dtype")
    sizes = [int(n) for n in (shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)]
    if -1 in sizes:
        rest = math.prod(n for n in sizes if n != -1)
        sizes[sizes.index(-1)] = math.prod(input.shape) // max(1, rest)
    return reshape_layer(site, input, sizes)


@rule("flatten")
def flatten(site: Site, input: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    """Describe `flatten`."""
    if not input.ndim:
        return reshape_layer(site, input, (1,))
    start, end = start_dim % input.ndim, end_dim % input.ndim
    middle = math.prod(input.shape[start : end + 1])
    return reshape_layer(site, input, (*input.shape[:start], middle, *input.shape[end + 1 :]))


@rule("ravel")
def ravel(site: Site, input: Value) -> Value:
    """Describe `ravel`."""
    return flatten(site, input)


@rule("unflatten")
def unflatten(site: Site, input: Value, dim: int, sizes: Any) -> Value:
    """Describe `unflatten`."""
    dim %= input.ndim
    parts = [n[1] if isinstance(n, (tuple, list)) else int(n) for n in sizes]
    if -1 in parts:
        rest = math.prod(n for n in parts if n != -1)
        parts[parts.index(-1)] = input.shape[dim] // rest
    return reshape_layer(site, input, (*input.shape[:dim], *parts, *input.shape[dim + 1 :]))


@rule("squeeze", "squeeze_copy")
def squeeze(site: Site, input: Value, dim: Any = None) -> Value:
    """Describe `squeeze`."""
    chosen = each(dim, 1) if dim is not None else tuple(range(input.ndim))
    drop = {d % max(1, input.ndim) for d in chosen}
    return reshape_layer(site, input, [n for d, n in enumerate(input.shape) if d not in drop or n != 1])


@rule("unsqueeze", "unsqueeze_copy")
def unsqueeze(site: Site, input: Value, dim: int, suffix: str = "") -> Value:
    """Describe `unsqueeze`."""
    dim %= input.ndim + 1
    return reshape_layer(site, input, (*input.shape[:dim], 1, *input.shape[dim:]), suffix)


def permute_layer(site: Site, input: Value, dims: Sequence[int]) -> Value:
    """Add a permutation of the dimensions."""
    dims = tuple(d % input.ndim for d in dims)
    return site.emit(
        torch.permute,
        (input, dims),
        {},
        kind=Kind.RESHAPE,
        op="permute",
        reads=[("input", input, tuple(Axis(dims.index(d)) for d in range(input.ndim)))],
        attributes={"dims": dims},
    )


@rule("permute", "permute_copy")
def permute(site: Site, input: Value, *dims: Any) -> Value:
    """Describe `permute`."""
    return permute_layer(site, input, dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)


@rule("transpose", "swapaxes", "swapdims", "transpose_copy")
def transpose(site: Site, input: Value, dim0: int, dim1: int) -> Value:
    """Describe `transpose`."""
    dims = list(range(input.ndim))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute_layer(site, input, dims)


@rule("t", "T", "numpy_T", "t_copy")
def reverse(site: Site, input: Value) -> Value:
    """Describe `x.t()` and `x.T`."""
    return permute_layer(site, input, tuple(reversed(range(input.ndim))))


@rule("mT", "adjoint")
def matrix_transpose(site: Site, input: Value) -> Value:
    """Describe `x.mT`."""
    return transpose(site, input, -2, -1)


@rule("movedim", "moveaxis")
def movedim(site: Site, input: Value, source: Any, destination: Any) -> Value:
    """Describe `movedim`."""
    sources = [d % input.ndim for d in each(source, 1)]
    targets = [d % input.ndim for d in each(destination, 1)]
    rest = iter([d for d in range(input.ndim) if d not in sources])
    placed = dict(zip(targets, sources, strict=True))
    return permute_layer(site, input, [placed[d] if d in placed else next(rest) for d in range(input.ndim)])


@rule("expand", "expand_as", "broadcast_to")
def expand(site: Site, input: Value, *shape: Any) -> Value:
    """Describe `expand`: the dimensions of length one are read whole."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    sizes = sizes.shape if isinstance(sizes, Value) else tuple(int(n) for n in sizes)
    first = len(sizes) - input.ndim
    sizes = tuple(input.shape[d - first] if n == -1 else n for d, n in enumerate(sizes))
    return site.emit(
        functional.Method("expand"),
        (input, sizes),
        {},
        kind=Kind.RESHAPE,
        op="expand",
        reads=lambda made: [("input", input, broadcast(input.shape, made.shape))],
        attributes={"shape": sizes},
    )


def pad_layer(site: Site, input: Value, pads: Pads, mode: str, value: float | None) -> Value:
    """Add padding, and cropping where it is negative."""
    crop = [(max(0, -lo), max(0, -hi)) for lo, hi in pads]
    if any(map(any, crop)):
        from shardwise.graph.normalise.slices import slice_layer

        stops = [n - hi for n, (_, hi) in zip(input.shape, crop, strict=True)]
        input = slice_layer(site, input, [lo for lo, _ in crop], stops, [1] * input.ndim, ".crop")
    pads = tuple((max(0, lo), max(0, hi)) for lo, hi in pads)
    if not any(map(any, pads)):
        return input
    padded = [d for d, pair in enumerate(pads) if any(pair)]
    # Modes that read the image want exactly the spatial dimensions.
    first = min(padded) if mode == "constant" else min(2 if input.ndim > 2 else 1, *padded)
    flat = [n for pair in reversed(pads[first:]) for n in pair]
    maps = [Axis(d, Padded(*pair, mode)) if any(pair) else Axis(d) for d, pair in enumerate(pads)]
    return site.emit(
        F.pad,
        (input, flat, mode, value),
        {},
        kind=Kind.RESHAPE,
        op="pad",
        reads=[("input", input, tuple(maps))],
        attributes={"padding": pads, "mode": mode, "value": 0.0 if value is None else value},
        suffix="" if site.step.target is F.pad else ".pad",
    )


@rule("pad", "aten.pad", "constant_pad_nd")
def pad(
    site: Site, input: Value, pad: Sequence[int], mode: Any = "constant", value: float | None = None
) -> Value:
    """Describe `F.pad`, whose list of pairs begins at the last dimension."""
    if not isinstance(mode, str):
        mode, value = "constant", mode
    amounts = [int(n) for n in pad]
    pairs = list(zip(amounts[::2], amounts[1::2], strict=True))
    pairs = [(0, 0)] * (input.ndim - len(pairs)) + pairs[::-1]
    return pad_layer(site, input, pairs, mode, value)


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(site: Site, input: Value, factor: int) -> Value:
    """Describe sub-pixel rearrangement."""
    up = "unshuffle" not in getattr(site.step.target, "__name__", str(site.step.target))
    if input.ndim != 4:
        raise Opaque("pixel shuffle of a tensor that is not 4-D")
    scaled = Scaled(factor, 1) if up else Scaled(1, factor)
    return site.emit(
        F.pixel_shuffle if up else F.pixel_unshuffle,
        (input, factor),
        {},
        kind=Kind.RESHAPE,
        op="pixel_shuffle" if up else "pixel_unshuffle",
        reads=[("input", input, (Axis(0), WHOLE, Axis(2, scaled), Axis(3, scaled)))],
        attributes={"factor": factor},
    )


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(site: Site, input: Value, groups: int) -> Value:
    """Describe a channel shuffle: pixels stay, channels are read whole."""
    return site.emit(
        F.channel_shuffle,
        (input, groups),
        {},
        kind=Kind.RESHAPE,
        op="channel_shuffle",
        reads=[("input", input, tuple(WHOLE if d == 1 else Axis(d) for d in range(input.ndim)))],
        attributes={"groups": groups},
    )


@rule("flip")
def flip(site: Site, input: Value, *dims: Any) -> Value:
    """Describe `flip`: the turned dimensions are read whole."""
    turned = {d % input.ndim for d in (dims[0] if not isinstance(dims[0], int) else dims)}
    return site.emit(
        torch.flip,
        (input, tuple(sorted(turned))),
        {},
        kind=Kind.RESHAPE,
        op="flip",
        reads=[("input", input, tuple(WHOLE if a.out in turned else a for a in same(input.ndim)))],
        attributes={"dims": tuple(sorted(turned))},
    )


@rule("repeat", "tile")
def repeat(site: Site, input: Value, *repeats: Any) -> Value:
    """Describe `repeat`: the repeated dimensions are read whole."""
    times = [int(n) for n in (repeats[0] if not isinstance(repeats[0], int) else repeats)]
    times = [1] * (input.ndim - len(times)) + times
    first = len(times) - input.ndim
    access = tuple(Axis(first + d) if times[first + d] == 1 else WHOLE for d in range(input.ndim))
    return site.emit(
        functional.Method("repeat"),
        (input, tuple(times)),
        {},
        kind=Kind.RESHAPE,
        op="repeat",
        reads=[("input", input, access)],
        attributes={"times": tuple(times)},
    )


@rule("roll")
def roll(site: Site, input: Value, shifts: Any, dims: Any = None) -> Value:
    """Describe `roll`: the shifted dimensions are read whole."""
    if dims is None or dims == ():
        raise Opaque("roll over the flattened elements")
    moved = tuple(d % input.ndim for d in each(dims, 1))
    amounts = each(shifts, len(moved))
    return site.emit(
        torch.roll,
        (input, amounts, moved),
        {},
        kind=Kind.RESHAPE,
        op="roll",
        reads=[("input", input, tuple(WHOLE if a.out in moved else a for a in same(input.ndim)))],
        attributes={"dims": moved, "shifts": amounts},
    )
