"""The index map and the weights of interpolation.

Every output has a source coordinate x on the scale of the inputs; it reads the inputs around x. Both follow
PyTorch's arithmetic, since a coordinate that falls on the other side of an integer picks another pixel.
With r = inputs / outputs (or 1 / the user's scale factor):

    nearest         x = r*o                      reads floor(x)
    nearest-exact   x = r*(o + 1/2) - 1/2        reads floor(x + 1/2)
    linear          x = max(0, r*(o + 1/2) - 1/2), or o*(n-1)/(size-1) with align_corners
    cubic           the same without the max; reads floor(x)-1 .. floor(x)+2, indices clamped

PyTorch's own kernels disagree in rare cases about the nearest pixel: where x is a tie, and where an odd scale
factor leaves the size as it was or doubles it. `taps` follows the general kernel; `need` covers all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.geometry.axes import carry, ceil_div
from shardwise.geometry.box import Range

MODES = ("nearest", "nearest-exact", "linear", "cubic")

Tap = tuple[tuple[int, ...], tuple[float, ...]]
"""The inputs that one output reads and their weights."""

# Each precision with the one in which its fused multiply-add is computed before rounding.
_WIDER: dict[str, Any] = {"float32": np.float64, "float64": np.longdouble}

# Kernels differ in precision and in fusing multiply and add, so ties may fall to either side.
_ROUNDINGS: tuple[tuple[Any, Any], ...] = (
    (np.float32, np.float32),
    (np.float32, np.float64),
    (np.float64, np.longdouble),
)


@dataclass(frozen=True, slots=True, init=False)
class Resize:
    """Output o interpolates between the inputs around its source coordinate.

    Args:
        size: number of outputs, kept as `outputs`.
        mode: "nearest", "nearest-exact", "linear" (also for bilinear and trilinear) or "cubic".
        align_corners: whether the centres of the outermost pixels, not their outer edges, coincide.
        scale: the scale factor that defines the coordinates, or None to take the ratio of the sizes.
    """

    outputs: int
    mode: str
    align_corners: bool
    scale: float | None

    def __init__(self, size: int, mode: str, align_corners: bool = False, scale: float | None = None) -> None:
        if mode not in MODES:
            raise ValueError(f"Resize: mode {mode!r} is unknown; use one of {', '.join(MODES)}")
        object.__setattr__(self, "outputs", size)
        object.__setattr__(self, "mode", mode)
        object.__setattr__(self, "align_corners", bool(align_corners) and not mode.startswith("nearest"))
        object.__setattr__(self, "scale", scale)

    def size(self, n: int) -> int:
        """Return the number of outputs, whatever the input."""
        return self.outputs

    def own(self, bounds: Sequence[int], n: int) -> tuple[int, ...]:
        """Cut the outputs in proportion to the inputs, so that a rank's outputs lie upon its inputs."""
        return carry(bounds, n, self.outputs, lambda c: ceil_div(c * self.outputs, n))

    def need(self, a: int, b: int, n: int) -> Range:
        """Return the inputs that the outputs `[a, b)` read, in whichever precision they are computed."""
        if b <= a:
            at = min(n, a * n // max(1, self.outputs))
            return (at, at)
        return _span(self, a, b, n)

    def taps(self, a: int, b: int, n: int, dtype: str = "float64") -> list[Tap]:
        """Return for each of the outputs `[a, b)` the global indices it reads and their weights."""
        indices, weights = self.table(a, b, n, dtype)
        pairs = zip(indices.tolist(), weights.tolist(), strict=True)
        return [(tuple(index), tuple(weight)) for index, weight in pairs]

    def table(
        self, a: int, b: int, n: int, dtype: str = "float64"
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return `taps` as two arrays of shape (outputs, taps).

        Args:
            dtype: precision of the coordinates; halves are computed as "float32".
        """
        if dtype not in _WIDER:
            raise ValueError(f"Resize: coordinates are computed in {' or '.join(_WIDER)}, not in {dtype}")
        o = np.arange(a, b)
        real = np.dtype(dtype).type
        if self.mode.startswith("nearest"):
            index = _nearest(self, o, n, real, _WIDER[dtype])
            return index[:, None], np.ones((len(o), 1))
        if self.mode == "linear" and self.outputs == n:
            return o[:, None], np.ones((len(o), 1))
        x = _coordinates(self, o, n, real, _WIDER[dtype])
        base = _floor(x, n)
        part = np.clip(x - base.astype(real), real(0), real(1))
        if self.mode == "linear":
            indices = np.stack([base, np.minimum(base + 1, n - 1)], 1)
            weights = np.stack([real(1) - part, part], 1)
        else:
            indices = np.clip(base[:, None] + np.arange(-1, 3), 0, n - 1)
            weights = _cubic(part.astype(_WIDER[dtype])).astype(real)
        return indices, weights.astype(np.float64)


def _coordinates(map_: Resize, o: NDArray[Any], n: int, real: Any, wide: Any) -> NDArray[Any]:
    """Return the source coordinates of the outputs `o`, rounded where PyTorch rounds them."""
    if map_.align_corners:
        ratio = real(n - 1) / real(map_.outputs - 1) if map_.outputs > 1 else real(0)
        return np.asarray(ratio * o.astype(real))
    # The product and the subtraction are one fused operation: rounded once.
    x = (wide(_ratio(map_, n, real)) * (o.astype(wide) + wide(0.5)) - wide(0.5)).astype(real)
    return np.asarray(x if map_.mode == "cubic" else np.maximum(x, real(0)))


def _ratio(map_: Resize, n: int, real: Any) -> Any:
    return real(1.0 / map_.scale) if map_.scale else real(n) / real(map_.outputs)


def _floor(x: NDArray[Any], n: int) -> NDArray[np.int64]:
    # PyTorch floors in single precision, also for doubles.
    return np.minimum(np.floor(x.astype(np.float32)).astype(np.int64), n - 1)


def _nearest(map_: Resize, o: NDArray[Any], n: int, real: Any, wide: Any) -> NDArray[np.int64]:
    if map_.mode == "nearest":
        return _floor(_ratio(map_, n, real) * o.astype(real), n)
    return _floor(_coordinates(map_, o, n, real, wide) + real(0.5), n)


def _cubic(t: NDArray[Any]) -> NDArray[Any]:
    """Return the four weights of cubic convolution with a = -3/4 at the fractions `t`."""
    a = t.dtype.type(-0.75)

    def near(x: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(((a + 2) * x - (a + 3)) * x * x + 1)

    def far(x: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(((a * x - 5 * a) * x + 8 * a) * x - 4 * a)

    return np.stack([far(t + 1), near(t), near(1 - t), far(2 - t)], 1)


@lru_cache(maxsize=65536)
def _span(map_: Resize, a: int, b: int, n: int) -> Range:
    """Return the hull of what the first and the last output read, over the ways to round coordinates."""
    ends = np.array([a, b - 1])
    if map_.mode == "linear" and map_.outputs == n:
        return (a, b)
    reads: list[NDArray[np.int64]] = []
    for real, wide in _ROUNDINGS:
        if map_.mode.startswith("nearest"):
            reads.append(_nearest(map_, ends, n, real, wide))
            if map_.mode == "nearest-exact":
                reads.append(_floor(_ratio(map_, n, real) * (ends.astype(real) + real(0.5)), n))
            continue
        base = _floor(_coordinates(map_, ends, n, real, wide), n)
        before, after = (1, 2) if map_.mode == "cubic" else (0, 1)
        reads += [np.clip(base - before, 0, n - 1), np.clip(base + after, 0, n - 1)]
    if map_.mode.startswith("nearest") and map_.outputs in (n, 2 * n):
        # Some kernels then copy or double the image, whatever the scale factor.
        reads.append(ends * n // map_.outputs)
    return (int(min(r[0] for r in reads)), int(max(r[1] for r in reads)) + 1)
