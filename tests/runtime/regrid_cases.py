"""Functions that run on every rank of a pool, for test_regrid.py."""

from __future__ import annotations

import math
import random

import torch
import torch.distributed as dist

from shardwise.geometry import Box, Layout, messages
from shardwise.runtime.differentiable import regrid
from shardwise.runtime.regrid import bind_regrid
from shardwise.runtime.wire import wire_of


def random_layout(rng: random.Random, shape, size: int, partial: bool) -> Layout:
    """Cut, replicate, overlap or leave out: any boxes, as long as every element is held somewhere."""
    kind = rng.choice(["tiles", "whole", "overlap", "one", "wild"])
    everything = Box.whole(shape)
    boxes = []
    dim = rng.randrange(len(shape))
    cuts = sorted(rng.randint(0, shape[dim]) for _ in range(size - 1))
    bounds = [0, *cuts, shape[dim]]
    for r in range(size):
        box = everything.replace(dim, (bounds[r], bounds[r + 1]))
        if kind == "whole":
            box = everything
        elif kind == "overlap":
            box = everything.replace(dim, (max(0, bounds[r] - 2), min(shape[dim], bounds[r + 1] + 1)))
        elif kind == "one":
            box = everything if r == size - 1 else Box((0,) * len(shape), (0,) * len(shape))
        elif kind == "wild" and partial:
            lo = [rng.randint(0, n) for n in shape]
            box = Box.of((a, rng.randint(a, n)) for a, n in zip(lo, shape, strict=True))
        boxes.append(box)
    return Layout(tuple(shape), tuple(boxes), tuple(range(size)), partial)


def _pieces(layout: Layout, seed: int) -> list[torch.Tensor]:
    """What each rank holds: pieces of one global tensor, or independent summands."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(layout.shape, dtype=torch.float64, generator=generator)
    if not layout.partial:
        return [whole[box.slices()].clone() for box in layout.boxes]
    return [torch.randn(box.shape, dtype=torch.float64, generator=generator) for box in layout.boxes]


def _value(layout: Layout, pieces: list[torch.Tensor]) -> torch.Tensor:
    """The global tensor that the pieces stand for."""
    result = torch.zeros(layout.shape, dtype=torch.float64)
    for box, piece in zip(layout.boxes, pieces, strict=True):
        if layout.partial:
            result[box.slices()] += piece
        else:
            result[box.slices()] = piece
    return result


def check_block(seed: int, count: int) -> float:
    """Run `count` random regrids and their adjoints; return the largest error seen on this rank."""
    rng = random.Random(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    wire = wire_of(dist.group.WORLD, range(size))
    errors = [0.0]
    for case in range(count):
        shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 4)))
        src = random_layout(rng, shape, size, partial=rng.random() < 0.5)
        dst = random_layout(rng, shape, size, partial=rng.random() < 0.5)
        if not dst.covers() and dst.partial:
            dst = dst.as_partial(False)
        pieces = _pieces(src, seed * 1000 + case)
        there, back = bind_regrid(
            src, dst, messages(src, dst), rank, wire, torch.float64, torch.device("cpu"), tag=case
        )
        result = there(pieces[rank])
        gathered: list[torch.Tensor] = [None] * size
        dist.all_gather_object(gathered, result)
        value = _value(src, pieces)
        if dst.partial:
            error = (_value(dst, gathered) - value).abs().max()
        else:
            expected = value[dst.boxes[rank].slices()]
            error = (result - expected).abs().max() if expected.numel() else torch.zeros(())
        errors.append(float(error))
        # <M x, y> == <x, M^T y> for arbitrary x and y.
        x = torch.randn(src.boxes[rank].shape, dtype=torch.float64)
        y = torch.randn(dst.boxes[rank].shape, dtype=torch.float64)
        dots = torch.stack(((there(x) * y).sum(), (x * back(y)).sum()))
        dist.all_reduce(dots)
        errors.append(float((dots[0] - dots[1]).abs() / (1 + dots[0].abs())))
    # What is no number is the worst of all; max() would pass over it.
    return max(math.inf if math.isnan(error) else error for error in errors)


def check_user_call() -> tuple[torch.Tensor, torch.Tensor]:
    """Use `sw.regrid` in an autograd graph: tiles to whole and back through a square."""
    from shardwise.geometry import tiles, whole

    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (1, 2, 6, 5)
    src, dst = tiles(shape, (size, 1)), whole(shape, size)
    full = torch.arange(60, dtype=torch.float64).reshape(shape)
    x = full[src.boxes[rank].slices()].clone().requires_grad_()
    y = regrid(x, src, dst)
    if rank == 0:
        (y * y).sum().backward()
    else:
        (y * 0).sum().backward()
    return y.detach(), x.grad, full[src.boxes[rank].slices()]


def check_second_gradient() -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiate the square of a gradient: rows of tiles, to columns, a cube of every number."""
    from shardwise.geometry import tiles

    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (1, 2, 6, 6)
    src, dst = tiles(shape, (size, 1)), tiles(shape, (1, size))
    full = torch.arange(72, dtype=torch.float64).reshape(shape)
    x = full[src.boxes[rank].slices()].clone().requires_grad_()
    (grad,) = torch.autograd.grad((regrid(x, src, dst) ** 3).sum(), x, create_graph=True)
    (grad**2).sum().backward()
    # (3 x^2)^2, differentiated.
    return x.grad, 36 * x.detach() ** 3


def check_shared_gradient() -> tuple[bool, bool]:
    """Widen tiles by a halo and add another tensor: autograd hands one gradient to both."""
    from shardwise.geometry import tiles

    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (1, 2, 6, 5)
    src = tiles(shape, (size, 1))
    wide = tuple(box.replace(2, (max(0, box.lo[2] - 1), min(6, box.hi[2] + 1))) for box in src.boxes)
    x = torch.ones(src.boxes[rank].shape, dtype=torch.float64, requires_grad=True)
    y = regrid(x, src, Layout(shape, wide, src.ranks))
    other = torch.zeros_like(y, requires_grad=True)
    weights = torch.arange(60, dtype=torch.float64).reshape(shape)
    ((y + other) * weights[wide[rank].slices()]).sum().backward()
    expected = torch.zeros(shape, dtype=torch.float64)
    for box in wide:
        expected[box.slices()] += weights[box.slices()]
    return (
        torch.equal(other.grad, weights[wide[rank].slices()]),
        torch.equal(x.grad, expected[src.boxes[rank].slices()]),
    )
