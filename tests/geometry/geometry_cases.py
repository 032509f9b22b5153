"""Random layers of every kind on random, uneven tiles, and the comparison of whole and parts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import geometry_brute as brute
import geometry_separable as separable
import numpy as np

from shardwise.geometry import (
    Adaptive,
    Axis,
    Box,
    Groups,
    Padded,
    Part,
    Resize,
    Scaled,
    Transposed,
    Window,
    local_box,
    needed,
)
from shardwise.geometry.access import Access

PADDING_MODES = ("zeros", "zeros", "reflect", "replicate", "circular")
Extent = tuple[int, ...]


def cuts(rng: random.Random, n: int, parts: int) -> tuple[int, ...]:
    """Cut `[0, n)` anywhere, so that tiles are uneven and some are empty."""
    return (0, *sorted(rng.randint(0, n) for _ in range(parts - 1)), n)


def window(rng: random.Random, n: int, *, small: bool = False) -> Window:
    """Draw a convolution's window that fits `n` inputs: any padding, one side or "same", any mode."""
    while True:
        kernel = rng.randint(1, 3 if small else 5)
        stride, dilation = rng.randint(1, 2 if small else 4), rng.randint(1, 2 if small else 3)
        pads = (rng.randint(0, 2 if small else 5), rng.randint(0, 2 if small else 5))
        if rng.random() < 0.2:
            total = dilation * (kernel - 1)
            stride, pads = 1, (total // 2, total - total // 2)
        mode = rng.choice(PADDING_MODES)
        if mode == "reflect" and n < 2 and pads != (0, 0):
            mode = "zeros"
        result = Window(kernel, stride, *pads, dilation, mode=mode)
        if result.size(n) > 0:
            return result


def pool(rng: random.Random, n: int, *, small: bool, dilated: bool) -> Window:
    while True:
        kernel = rng.randint(1, 3 if small else 5)
        pad = rng.randint(0, kernel // 2)
        dilation = rng.randint(1, 3) if dilated else 1
        result = Window(kernel, rng.randint(1, 4), pad, pad, dilation, ceil=rng.random() < 0.5)
        if result.size(n) > 0:
            return result


def transposed(rng: random.Random, n: int, *, small: bool = False) -> Transposed:
    while True:
        stride, dilation = rng.randint(1, 4), rng.randint(1, 3)
        result = Transposed(
            rng.randint(1, 3 if small else 5),
            stride,
            rng.randint(0, 4),
            dilation,
            rng.randint(0, max(stride, dilation) - 1),
        )
        if result.size(n) > 0:
            return result


def padded(rng: random.Random, n: int) -> Padded:
    mode = rng.choice((*PADDING_MODES, "constant"))
    while True:
        lo, hi = rng.randint(-3, 5), rng.randint(-3, 5)
        inside = n + min(0, lo) + min(0, hi)
        # Numpy, the judge here, pads what is left after cropping; for reflections that is another image.
        cropped = inside < n and mode in ("reflect", "replicate")
        if inside >= 2 and not cropped:
            return Padded(lo, hi, mode)
        if n < 2:
            return Padded(rng.randint(0, 3), rng.randint(0, 3), "zeros")


def resizes(rng: random.Random, extent: Extent) -> list[Resize]:
    modes = ["nearest", "nearest-exact", "linear"] + (["cubic"] if len(extent) == 2 else [])
    mode, align = rng.choice(modes), rng.random() < 0.5
    if rng.random() < 0.5:
        return [Resize(rng.randint(1, 2 * n + 3), mode, align, None) for n in extent]
    scale = rng.choice((2.0, 0.5, 1.5, 3.0, rng.uniform(0.5, 3.0)))
    if any(int(float(n) * scale) < 1 for n in extent):
        scale = 2.0
    return [Resize(int(float(n) * scale), mode, align, scale) for n in extent]


def part(rng: random.Random, n: int) -> Part:
    if rng.random() < 0.5:
        start = rng.randint(0, 6)
        return Part(-start, start + n + rng.randint(0, 6))
    start, step = rng.randint(0, n - 1), rng.randint(1, 4)
    return Part(start, rng.choice((None, rng.randint(1, (n - start - 1) // step + 1))), step)


Maker = Callable[[random.Random, np.random.Generator, Extent], brute.Layer]


def _make(rng: random.Random, draw: Callable[..., object], extent: Extent, **options: object) -> list[object]:
    return [draw(rng, n, **options) for n in extent]


def _small(extent: Extent) -> bool:
    return len(extent) > 1


KINDS: dict[str, Maker] = {
    "convolution": lambda r, g, e: brute.Convolution(_make(r, window, e, small=_small(e)), g),
    "transposed": lambda r, g, e: brute.TransposedConvolution(_make(r, transposed, e, small=_small(e)), g),
    "max_pool": lambda r, g, e: brute.MaxPool(_make(r, pool, e, small=_small(e), dilated=True), g),
    "average_pool": lambda r, g, e: brute.AveragePool(
        _make(r, pool, e, small=_small(e), dilated=False), g, r.random() < 0.5
    ),
    "adaptive_pool": lambda r, g, e: separable.AdaptiveAverage([Adaptive(r.randint(1, n + 2)) for n in e]),
    "resize": lambda r, g, e: separable.Interpolation(resizes(r, e)),
    "pad": lambda r, g, e: brute.Pad(_make(r, padded, e), r.choice((0.0, 1.5))),
    "part": lambda r, g, e: brute.Slice(_make(r, part, e)),
    "groups": lambda r, g, e: separable.Grouped([Groups(_divisor(r, n), r.randint(1, 3)) for n in e], g),
    "shuffle": lambda r, g, e: separable.Shuffle([_scaled(r, n) for n in e]),
}


def _divisor(rng: random.Random, n: int) -> int:
    return rng.choice([d for d in range(1, n + 1) if n % d == 0])


def _scaled(rng: random.Random, n: int) -> Scaled:
    return Scaled(rng.randint(1, 3), 1) if rng.random() < 0.5 else Scaled(1, _divisor(rng, n))


@dataclass
class Case:
    """A layer, its input, and the cuts of the input and of the output."""

    layer: brute.Layer
    x: np.ndarray
    cuts: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...] | None

    def __str__(self) -> str:
        maps = ", ".join(map(str, self.layer.maps))
        return f"{type(self.layer).__name__} {maps} on {self.x.shape} cut at {self.cuts} -> {self.outputs}"


def case(kind: str, dims: int, rng: random.Random) -> Case:
    longest = (24, 9, 6)[dims - 1]
    extent = tuple(rng.randint(1, longest) for _ in range(dims))
    generator = np.random.default_rng(rng.getrandbits(32))
    layer = KINDS[kind](rng, generator, extent)
    x = generator.standard_normal((rng.randint(1, 2), rng.randint(1, 2), *extent) if dims > 1 else extent)
    parts = [rng.randint(1, (6, 3, 2)[dims - 1]) for _ in extent]
    bounds = tuple(cuts(rng, n, p) for n, p in zip(extent, parts, strict=True))
    # Outputs mostly follow their inputs; now and then they are cut anywhere, so halos exceed neighbours.
    sizes = [m.size(n) for m, n in zip(layer.maps, extent, strict=True)]
    anywhere = tuple(cuts(rng, n, p) for n, p in zip(sizes, parts, strict=True))
    return Case(layer, x, bounds, anywhere if rng.random() < 0.25 else None)


def close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if np.array_equal(a, b):
        return True
    with np.errstate(invalid="ignore"):
        return bool(((a == b) | (np.abs(a - b) <= 1e-11)).all())


def widen(rng: random.Random, box: Box, shape: Sequence[int]) -> Box:
    """Let a rank hold somewhat more than it needs."""
    return Box.of(
        (rng.randint(0, lo), rng.randint(max(lo, hi), n))
        for (lo, hi), n in zip(box.ranges, shape, strict=True)
    )


def check(one: Case, rng: random.Random) -> int:
    """Compare every rank's part, made from its needed box alone, with the unsplit result."""
    layer, x = one.layer, one.x
    lead = x.ndim - len(layer.maps)
    access: Access = tuple(Axis(d) for d in range(lead))
    access += tuple(Axis(lead + d, m) for d, m in enumerate(layer.maps))
    expected = layer.whole(x)
    extent = x.shape[lead:]
    sizes = tuple(m.size(n) for m, n in zip(layer.maps, extent, strict=True))
    assert expected.shape[lead:] == sizes, f"{one}: sizes {sizes}, really {expected.shape[lead:]}"
    bounds = one.outputs
    if bounds is None:
        bounds = tuple(m.own(b, n) for m, b, n in zip(layer.maps, one.cuts, extent, strict=True))
        for cut, size, asked in zip(bounds, sizes, one.cuts, strict=True):
            assert cut[0] == 0, one
            assert cut[-1] == size, one
            assert len(cut) == len(asked), one
            assert list(cut) == sorted(cut), one
    leading = [(0, n) for n in x.shape[:lead]]
    parts = 0
    for cell in itertools.product(*(itertools.pairwise(b) for b in bounds)):
        out = Box.of([*leading, *cell])
        held = needed(access, x.shape, out)
        assert Box.whole(x.shape).contains(held), one
        if out.empty:
            assert held.empty, one
            continue
        if rng.random() < 0.3:
            held = widen(rng, held, x.shape)
        windows = local_box(access, x.shape, out, held)[lead:]
        made = layer.part(x[held.slices()].copy(), windows, out, held.lo[lead:])
        assert close(made, expected[out.slices()]), f"{one}: {out} from {held} is wrong"
        parts += 1
    return parts


def check_block(kind: str, dims: int, seed: int, count: int) -> None:
    rng = random.Random(f"{kind} {dims} {seed}")
    parts = sum(check(case(kind, dims, rng), rng) for _ in range(count))
    assert parts > count // 2
