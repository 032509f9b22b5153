"""Layers written straight from their definitions, in numpy, for any number of spatial dimensions.

Every layer has `maps` (one index map per spatial dimension), `whole(x)`, which knows nothing of boxes, and
`part(held, windows, out)`, which sees only what a rank holds and the geometry's instructions for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwise.geometry import (
    AxisMap,
    Box,
    LocalWindow,
    Padded,
    Part,
    Transposed,
    Window,
)

Array = NDArray[np.float64]
NUMPY_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def along(dim: int, ndim: int, at: slice) -> tuple[slice, ...]:
    return (slice(None),) * dim + (at,) + (slice(None),) * (ndim - dim - 1)


def grow(x: Array, dim: int, before: int, after: int, value: float) -> Array:
    if not before and not after:
        return x
    shape = list(x.shape)
    shape[dim] += before + after
    result = np.full(shape, value)
    result[along(dim, x.ndim, slice(before, before + x.shape[dim]))] = x
    return result


def assemble(held: Array, windows: Sequence[LocalWindow], value: float = 0.0) -> Array:
    """Build a kernel's input from what is held, as the windows say."""
    lead = held.ndim - len(windows)
    for dim, window in enumerate(windows, lead):
        if window.segments:
            parts = []
            for segment in window.segments:
                piece = held[along(dim, held.ndim, slice(*segment.source))]
                length = segment.at[1] - segment.at[0]
                piece = np.flip(piece, dim) if segment.reversed else piece
                parts.append(np.repeat(piece, length, dim) if piece.shape[dim] == 1 else piece)
            held = np.concatenate(parts, dim)
        else:
            held = held[along(dim, held.ndim, slice(*window.crop))]
            held = grow(held, dim, *window.pad, value)
    return held


def finish(y: Array, windows: Sequence[LocalWindow]) -> Array:
    """Keep and fill a kernel's outputs as the windows say."""
    lead = y.ndim - len(windows)
    for dim, window in enumerate(windows, lead):
        y = y[along(dim, y.ndim, slice(*window.out_crop))]
        y = grow(y, dim, *window.out_fill, 0.0)
    return y


def pad_like_numpy(x: Array, pads: Sequence[tuple[int, int]], modes: Sequence[str], value: float) -> Array:
    lead = x.ndim - len(pads)
    for dim, ((lo, hi), mode) in enumerate(zip(pads, modes, strict=True), lead):
        n = x.shape[dim]
        x = x[along(dim, x.ndim, slice(max(0, -lo), n - max(0, -hi)))]
        width = [(0, 0)] * dim + [(max(0, lo), max(0, hi))] + [(0, 0)] * (x.ndim - dim - 1)
        if width[dim] == (0, 0):
            continue
        if mode in NUMPY_MODES:
            x = np.pad(x, width, mode=NUMPY_MODES[mode])  # type: ignore[call-overload]
        else:
            x = grow(x, dim, *width[dim], value)
    return x


def shifted(x: Array, maps: Sequence[Window], offset: Sequence[int]) -> Array:
    """Return x[o*s + j*d] for all o that fit, at one offset j of the kernel."""
    lead = x.ndim - len(maps)
    at: list[slice] = [slice(None)] * lead
    for m, j, n in zip(maps, offset, x.shape[lead:], strict=True):
        count = (n - m.reach) // m.stride + 1
        at.append(slice(j * m.dilation, j * m.dilation + (count - 1) * m.stride + 1, m.stride))
    return x[tuple(at)]


def offsets(maps: Sequence[Window | Transposed]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(m.kernel) for m in maps)))


class Layer:
    maps: tuple[AxisMap, ...]
    fill = 0.0

    def whole(self, x: Array) -> Array:
        raise AssertionError

    def kernel(self, x: Array) -> Array:
        raise AssertionError

    def part(self, held: Array, windows: Sequence[LocalWindow], out: Box, origin: Sequence[int]) -> Array:
        """Make the box `out`; `origin` is the global position of the first element held."""
        return finish(self.kernel(assemble(held, windows, self.fill)), windows)


class Convolution(Layer):
    def __init__(self, maps: Sequence[Window], rng: np.random.Generator) -> None:
        self.maps = self.windows = tuple(maps)
        self.weight = rng.standard_normal([m.kernel for m in maps])

    def whole(self, x: Array) -> Array:
        pads = [(m.pad_lo, m.pad_hi) for m in self.windows]
        return self.kernel(pad_like_numpy(x, pads, [m.mode for m in self.windows], 0.0))

    def kernel(self, x: Array) -> Array:
        return sum(self.weight[j] * shifted(x, self.windows, j) for j in offsets(self.windows))  # type: ignore[return-value]


def overhang(m: Window, n: int) -> int:
    """Return how far the last window reaches beyond the padded input."""
    return max(0, (m.size(n) - 1) * m.stride + m.reach - (n + m.pad_lo + m.pad_hi))


class MaxPool(Convolution):
    fill = -math.inf

    def whole(self, x: Array) -> Array:
        lead = x.ndim - len(self.maps)
        pads = [
            (m.pad_lo, m.pad_hi + overhang(m, n)) for m, n in zip(self.windows, x.shape[lead:], strict=True)
        ]
        return self.kernel(pad_like_numpy(x, pads, ["zeros"] * len(pads), -math.inf))

    def kernel(self, x: Array) -> Array:
        return np.max([shifted(x, self.windows, j) for j in offsets(self.windows)], axis=0)


class AveragePool(Convolution):
    def __init__(self, maps: Sequence[Window], rng: np.random.Generator, include: bool) -> None:
        super().__init__(maps, rng)
        self.weight = np.ones([m.kernel for m in maps])
        self.include = include
        self.extent: tuple[int, ...] = ()

    def whole(self, x: Array) -> Array:
        lead = x.ndim - len(self.maps)
        self.extent = x.shape[lead:]
        inner = [(m.pad_lo, m.pad_hi) for m in self.windows]
        outer = [(0, overhang(m, n)) for m, n in zip(self.windows, self.extent, strict=True)]
        zeros = ["zeros"] * len(inner)
        counted = np.ones(self.extent)
        counted = pad_like_numpy(counted, inner, zeros, 1.0 if self.include else 0.0)
        x = pad_like_numpy(pad_like_numpy(x, inner, zeros, 0.0), outer, zeros, 0.0)
        count = self.kernel(pad_like_numpy(counted, outer, zeros, 0.0))
        return self.kernel(x) / np.maximum(count, 1.0)

    def part(self, held: Array, windows: Sequence[LocalWindow], out: Box, origin: Sequence[int]) -> Array:
        y = super().part(held, windows, out, origin)
        lead = out.ndim - len(self.maps)
        for dim, (m, n) in enumerate(zip(self.windows, self.extent, strict=True), lead):
            by = np.array(m.divisors(out.lo[dim], out.hi[dim], n, self.include), dtype=float)
            y = y / by.reshape([-1] + [1] * (y.ndim - dim - 1))
        return y


class TransposedConvolution(Layer):
    def __init__(self, maps: Sequence[Transposed], rng: np.random.Generator) -> None:
        self.maps = self.windows = tuple(maps)
        self.weight = rng.standard_normal([m.kernel for m in maps])

    def scatter(self, x: Array, extra: Sequence[int]) -> Array:
        lead = x.ndim - len(self.maps)
        shape = list(x.shape[:lead])
        for m, n, more in zip(self.windows, x.shape[lead:], extra, strict=True):
            shape.append((n - 1) * m.stride + m.reach + more if n else more)
        y = np.zeros(shape)
        if x.size:
            for j in offsets(self.windows):
                at = [slice(None)] * lead
                for m, i, n in zip(self.windows, j, x.shape[lead:], strict=True):
                    at.append(slice(i * m.dilation, i * m.dilation + (n - 1) * m.stride + 1, m.stride))
                y[tuple(at)] += self.weight[j] * x
        return y

    def whole(self, x: Array) -> Array:
        y = self.scatter(x, [m.output_padding for m in self.windows])
        lead = x.ndim - len(self.maps)
        at = [slice(None)] * lead
        at += [slice(m.padding, n - m.padding) for m, n in zip(self.windows, y.shape[lead:], strict=True)]
        return y[tuple(at)]

    def kernel(self, x: Array) -> Array:
        return self.scatter(x, [0] * len(self.windows))


class Pad(Layer):
    def __init__(self, maps: Sequence[Padded], value: float) -> None:
        self.maps = self.pads = tuple(maps)
        self.fill = value

    def whole(self, x: Array) -> Array:
        return pad_like_numpy(x, [(m.lo, m.hi) for m in self.pads], [m.mode for m in self.pads], self.fill)

    def kernel(self, x: Array) -> Array:
        return x


class Slice(Layer):
    """A strided slice, or one operand of a concatenation with zeros for the others."""

    def __init__(self, maps: Sequence[Part]) -> None:
        self.maps = tuple(maps)

    def whole(self, x: Array) -> Array:
        for dim, m in enumerate(self.maps, x.ndim - len(self.maps)):
            if m.offset < 0 or m.size(x.shape[dim]) > x.shape[dim]:
                x = grow(x, dim, -m.offset, m.size(x.shape[dim]) + m.offset - x.shape[dim], 0.0)
            else:
                stop = None if m.length is None else m.offset + m.length * m.step
                x = x[along(dim, x.ndim, slice(m.offset, stop, m.step))]
        return x

    def part(self, held: Array, windows: Sequence[LocalWindow], out: Box, origin: Sequence[int]) -> Array:
        y = assemble(held, windows)
        for dim, m in enumerate(self.maps, y.ndim - len(self.maps)):
            y = y[along(dim, y.ndim, slice(None, None, m.step))]
        return finish(y, windows)
