"""What an inner rank of a group does in one layer: its task, what it receives, what it keeps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.geometry import Box
from shardwise.geometry.access import needed
from shardwise.graph import Kind, Layer, Operand, Source
from shardwise.oracle.kernels import Task
from shardwise.program.assign import Home


@dataclass(frozen=True, slots=True)
class Move:
    """What an inner rank receives before a layer: bytes for the whole mini-batch, from so many peers."""

    nbytes: float
    peers: int
    reduces: bool = False


@dataclass(slots=True)
class LayerClass:
    """One representative of layers that cost the same: a rank's task and its communication.

    Layers of one `kind` compute the same when whole. `saved` are bytes kept for backward and `made` bytes of
    the output, for the whole mini-batch; `weights` and `trained` do not depend on the samples. `channels`
    are those of shared statistics. What is `done` may be another layer's work, a batch norm's that shares its
    statistics and rectifies what it makes: such layers take no time and keep nothing here, so that bounds
    hold for replicas too, of which classes do not know.
    """

    kind: int
    task: Task
    moves: tuple[Move, ...]
    channels: int
    saved: float
    made: float
    weights: float
    trained: float
    grad: bool
    input_grad: bool
    done: bool = False


@dataclass(frozen=True, slots=True)
class Value:
    """A value that a layer reads: who makes it, its home, what an inner rank has of it, and what is new.

    `brought`: this layer is the first to need it there; `kept`: it is the first to keep it.
    """

    layer: Layer
    home: Home
    box: Box
    brought: bool
    kept: bool
    grad: bool


def layer_class(
    kind: int,
    layer: Layer,
    home: Home,
    made_box: Box,
    values: Sequence[Value],
    *,
    keeps_own: bool,
    grad: bool,
    width: int,
    frozen: frozenset[str],
    done: bool = False,
    rectifies: bool = False,
) -> LayerClass:
    """Return what a layer with this home costs an inner rank.

    Args:
        kind: a number that layers share which compute the same when whole.
        layer: the layer.
        home: how its output is shared out.
        made_box: what of it an inner rank makes.
        values: what it reads, in the order of its operands.
        keeps_own: whether it is the first to keep its own output for backward.
        grad: whether its output needs a gradient.
        width: ranks of the group.
        frozen: parameters that are not trained.
        done: whether a norm in front of it does its work where that shares statistics.
        rectifies: whether it is such a norm.
    """
    itemsize = layer.outputs[0].itemsize
    out = Box.whole(layer.outputs[0].shape) if home.sums else made_box
    held: list[Box] = []
    moves: list[Move] = []
    saved, named, weights, trained = 0.0, 0, 0.0, 0.0
    position = 0
    for operand in layer.operands:
        size = operand.spec.itemsize
        if operand.origin is not Source.VALUE:
            box = _parameter(layer, operand, home, out)
            held.append(box)
            weights += box.size * size
            if operand.origin is Source.PARAMETER and operand.source not in frozen:
                trained += box.size * size
            continue
        value = values[position]
        wants = (
            inner_of(home.reads[position].bounds)
            if home.sums
            else needed(operand.access, operand.spec.shape, out)
        )
        if value.brought and value.layer.kind is not Kind.INPUT:
            moves += _moves(value.home, value.box, wants, size)
        if value.kept:
            saved += (value.box.hull(wants).size if value.box.meets(wants) else wants.size) * size
        named += operand.spec.nbytes if value.layer.name in layer.saves else 0
        held.append(wants)
        position += 1
    made = float(out.size * itemsize)
    if keeps_own:
        saved += made
    named += layer.outputs[0].nbytes if layer.name in layer.saves else 0
    saved += max(0, layer.saved_bytes - named) * out.size / max(1, layer.outputs[0].numel)
    if home.sums:
        whole = layer.outputs[0].nbytes
        # Summands of a value that stays cut travel piece by piece, those of a whole one as one sum.
        cut = bool(home.cuts.dims)
        moves.append(Move(whole * (width - 1) / width if cut else whole, width - 1, not cut))
    norm = layer.op == "batch_norm" and layer.attributes.get("batch_statistics", False)
    boxes = tuple(held)
    shared = norm and any(d != 1 for d in home.cuts.dims)
    return LayerClass(
        kind,
        Task(layer, boxes, boxes, out, shared, rectifies=shared and rectifies),
        tuple(moves),
        out.shape[1] if norm else 0,
        saved if grad else 0.0,
        0.0 if layer.alias or layer.kind is Kind.INPUT else made,
        weights,
        trained,
        grad,
        any(value.grad for value in values),
        done,
    )


def inner(home: Home) -> Box:
    """Return the part of a value that an inner rank has at home."""
    return inner_of(home.cuts.bounds)


def inner_of(bounds: Sequence[Sequence[int]]) -> Box:
    """Return the part of an inner rank: the second one along every dimension that is cut in three or more.

    Of parts that differ in size the first ones are larger; where the second is empty only the first works.
    """
    cells = []
    for cut in bounds:
        part = 1 if len(cut) > 3 and cut[2] > cut[1] else 0
        cells.append((cut[part], cut[part + 1]))
    return Box.of(cells)


def _parameter(layer: Layer, operand: Operand, home: Home, out: Box) -> Box:
    spec, access = operand.spec, operand.access
    if home.sums:
        index = layer.operands.index(operand)
        for group in layer.contracts:
            for position, dim in group:
                if position == index:
                    first = next(d for p, d in group if p == 0)
                    cell = inner_of(home.reads[0].bounds).ranges[first]
                    return Box.whole(spec.shape).replace(dim, cell)
        return Box.whole(spec.shape)
    return needed(access, spec.shape, out)


def _moves(home: Home, has: Box, wants: Box, itemsize: int) -> list[Move]:
    """Return what has to arrive so that a rank that holds `has` gets `wants`."""
    if home.sums:
        return []
    missing = (wants.size - has.intersect(wants).size) * itemsize
    if missing <= 0:
        return []
    peers = 1
    for dim, (lo, hi) in enumerate(wants.ranges):
        bounds = home.cuts.bounds[dim]
        peers *= sum(1 for x, y in itertools.pairwise(bounds) if x < hi and y > lo and y > x) or 1
    return [Move(float(missing), max(1, peers - 1))]
