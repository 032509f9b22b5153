"""Brute-force layers that are a matrix along each dimension: interpolation, adaptive pooling and the like."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from geometry_brute import Array, Layer, assemble
from torch.nn import functional

from shardwise.geometry import Adaptive, AxisMap, Box, Groups, LocalWindow, Resize, Scaled


class Separable(Layer):
    """A layer that is a matrix along each dimension.

    `matrix` is that of the definition, `local` the rows of the outputs `[a, b)` for inputs from `start` on.
    """

    def matrix(self, m: AxisMap, n: int) -> Array:
        raise AssertionError

    def local(self, m: AxisMap, a: int, b: int, n: int, start: int, count: int) -> Array:
        raise AssertionError

    def whole(self, x: Array) -> Array:
        self.extent = x.shape[x.ndim - len(self.maps) :]
        for dim, m in enumerate(self.maps, x.ndim - len(self.maps)):
            x = apply(self.matrix(m, x.shape[dim]), x, dim)
        return x

    def part(self, held: Array, windows: Sequence[LocalWindow], out: Box, origin: Sequence[int]) -> Array:
        y = assemble(held, windows)
        lead = held.ndim - len(self.maps)
        for i, (m, window, n) in enumerate(zip(self.maps, windows, self.extent, strict=True)):
            dim, start = lead + i, origin[i] + window.crop[0]
            y = apply(self.local(m, out.lo[dim], out.hi[dim], n, start, y.shape[dim]), y, dim)
        return y


def apply(matrix: Array, x: Array, dim: int) -> Array:
    if x.ndim == 1:
        return matrix @ x
    return np.moveaxis(np.tensordot(matrix, x, (1, dim)), 0, dim)


class AdaptiveAverage(Separable):
    def __init__(self, maps: Sequence[Adaptive]) -> None:
        self.maps = tuple(maps)

    def matrix(self, m: Adaptive, n: int) -> Array:  # type: ignore[override]
        result = np.zeros((m.output, n))
        for i in range(m.output):
            first, last = math.floor(i * n / m.output), math.ceil((i + 1) * n / m.output)
            result[i, first:last] = 1 / (last - first)
        return result

    def local(self, m: Adaptive, a: int, b: int, n: int, start: int, count: int) -> Array:  # type: ignore[override]
        result = np.zeros((b - a, count))
        for row, (first, last) in enumerate(m.windows(a, b, n)):
            assert start <= first < last <= start + count
            result[row, first - start : last - start] = 1 / (last - first)
        return result


class Interpolation(Separable):
    """Torch's interpolation as a whole; in parts by the geometry's taps.

    Torch's kernels disagree about ties of the nearest pixel, depending on sizes, memory formats and
    processors; there the indices are torch's own, and what is tested is that they are held.
    """

    def __init__(self, maps: Sequence[Resize]) -> None:
        self.maps = tuple(maps)
        self.picked: dict[int, Array] = {}

    def interpolate(self, x: Array) -> Array:
        first = self.maps[0]
        names = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("", "bicubic", "")}
        mode = names[first.mode][len(self.maps) - 1] if first.mode in names else first.mode
        align = {} if first.mode.startswith("nearest") else {"align_corners": first.align_corners}
        if first.scale is None:
            target = {"size": tuple(m.outputs for m in self.maps)}
        else:
            target = {"scale_factor": tuple(m.scale for m in self.maps)}
        lead = x.shape[: x.ndim - len(self.maps)]
        batch = np.ascontiguousarray(x).reshape((1, math.prod(lead), *self.extent))
        y = functional.interpolate(torch.from_numpy(batch), mode=mode, **target, **align).numpy()
        return y.reshape((*lead, *y.shape[2:]))

    def whole(self, x: Array) -> Array:
        dims = len(self.maps)
        self.extent = x.shape[x.ndim - dims :]
        if self.maps[0].mode.startswith("nearest"):
            for dim, n in enumerate(self.extent):
                line = np.arange(n, dtype=float).reshape([-1] + [1] * (dims - dim - 1))
                grid = self.interpolate(np.broadcast_to(line, x.shape).copy())
                self.picked[dim] = np.moveaxis(grid, x.ndim - dims + dim, -1).reshape(
                    -1, grid.shape[x.ndim - dims + dim]
                )[0]
        return self.interpolate(x)

    def local(self, m: Resize, a: int, b: int, n: int, start: int, count: int) -> Array:  # type: ignore[override]
        index, weight = m.table(a, b, n)
        for dim, own in enumerate(self.maps):
            if own is m and dim in self.picked:
                index = self.picked[dim][a:b, None].astype(int)
        assert start <= index.min() <= index.max() < start + count
        result = np.zeros((b - a, count))
        rows = np.arange(b - a)
        for tap in range(index.shape[1]):
            result[rows, index[:, tap] - start] += weight[:, tap]
        return result


class Grouped(Separable):
    """A grouped 1x1 convolution along one dimension."""

    def __init__(self, maps: Sequence[Groups], rng: np.random.Generator) -> None:
        self.maps = tuple(maps)
        self.weight = rng.standard_normal((72, 24))

    def matrix(self, m: Groups, n: int) -> Array:  # type: ignore[override]
        result = np.zeros((n // m.inputs * m.outputs, n))
        for group in range(n // m.inputs):
            rows = slice(group * m.outputs, (group + 1) * m.outputs)
            columns = slice(group * m.inputs, (group + 1) * m.inputs)
            result[rows, columns] = self.weight[rows, columns]
        return result

    def local(self, m: Groups, a: int, b: int, n: int, start: int, count: int) -> Array:  # type: ignore[override]
        result = np.zeros((b - a, count))
        for row, o in enumerate(range(a, b)):
            first = o // m.outputs * m.inputs
            assert start <= first < first + m.inputs <= start + count
            result[row, first - start : first - start + m.inputs] = self.weight[o, first : first + m.inputs]
        return result


class Shuffle(Separable):
    """Pixel shuffle seen along one dimension: an output reads every input that it overlaps."""

    def __init__(self, maps: Sequence[Scaled]) -> None:
        self.maps = tuple(maps)

    def matrix(self, m: Scaled, n: int) -> Array:  # type: ignore[override]
        fine = np.repeat(np.eye(n), m.numerator, axis=0)
        return fine.reshape(n * m.numerator // m.denominator, m.denominator, n).sum(1)

    def local(self, m: Scaled, a: int, b: int, n: int, start: int, count: int) -> Array:  # type: ignore[override]
        result = np.zeros((b - a, count))
        for row, o in enumerate(range(a, b)):
            for fine in range(o * m.denominator, (o + 1) * m.denominator):
                assert start <= fine // m.numerator < start + count
                result[row, fine // m.numerator - start] += 1.0
        return result
