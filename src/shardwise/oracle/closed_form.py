"""ParaDL's formulas: time, communication and memory of each strategy in closed form, per epoch.

    D samples per epoch     B samples per iteration     p PEs (p1 data groups of p2 for hybrids)
    S micro-batches         delta bytes per element     alpha start-up seconds, beta seconds per byte

    W = sum |w|     A = sum (|x| + |y|)     C1 = sum (FW + BW)     U = sum WU

|x|, |y| count elements per sample, |w| all elements of a weight; FW and BW are seconds per sample, WU
seconds per iteration. Formulas and their omissions (no overlap, compute divided by p, rings everywhere,
no optimizer state) are those of ParaDL, Table III; they serve for teaching, for cross-checks and for
comparisons with its publications. Predictions of shardwise walk the lowered program instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.oracle.records import Record


@dataclass(frozen=True, slots=True)
class Setting:
    """The constants of the formulas; `outer` is the network between data groups of a hybrid."""

    samples: int
    batch: int
    alpha: float
    beta: float
    delta: int = 4
    outer_alpha: float | None = None
    outer_beta: float | None = None
    contention: float = 1.0

    @property
    def iterations(self) -> float:
        """Return D/B."""
        return self.samples / self.batch

    @property
    def outer(self) -> tuple[float, float]:
        """Return start-up and seconds per byte between groups, with links shared by several flows."""
        alpha = self.alpha if self.outer_alpha is None else self.outer_alpha
        beta = self.beta if self.outer_beta is None else self.outer_beta
        return alpha, beta * self.contention


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of computation and communication of an epoch, and bytes of one PE."""

    compute: float
    communication: float
    memory: float

    @property
    def total(self) -> float:
        """Return the seconds of an epoch."""
        return self.compute + self.communication

    def iteration_seconds(self, setting: Setting) -> float:
        """Return the seconds of one iteration."""
        return self.total / setting.iterations


def message(alpha: float, beta: float, nbytes: float) -> float:
    """Return Hockney's time of a message."""
    return alpha + nbytes * beta


def ring_all_reduce(p: int, nbytes: float, alpha: float, beta: float) -> float:
    """Return the time of a ring all-reduce of `nbytes` on each PE."""
    return 2 * (p - 1) * (alpha + nbytes / p * beta)


def ring_all_gather(p: int, nbytes: float, alpha: float, beta: float) -> float:
    """Return the time of a ring all-gather to which each PE contributes `nbytes`."""
    return (p - 1) * (alpha + nbytes * beta)


def serial(layers: Sequence[Record], s: Setting) -> Cost:
    """ParaDL, Table III, serial."""
    compute = s.samples * _c1(layers) + s.iterations * _u(layers)
    return Cost(compute, 0.0, 2 * s.delta * (s.batch * _a(layers) + _w(layers)))


def data(layers: Sequence[Record], s: Setting, p: int) -> Cost:
    """ParaDL, Table III, data: every PE has all weights and B/p samples."""
    compute = s.samples / p * _c1(layers) + s.iterations * _u(layers)
    reduce = ring_all_reduce(p, _w(layers) * s.delta, s.alpha, s.beta)
    memory = 2 * s.delta * (s.batch / p * _a(layers) + _w(layers))
    return Cost(compute, s.iterations * reduce, memory)


def spatial(layers: Sequence[Record], s: Setting, grid: Sequence[int]) -> Cost:
    """ParaDL, Table III, spatial: every PE has all weights and a tile of every sample."""
    p = math.prod(grid)
    compute = s.samples / p * _c1(layers) + s.iterations * _u(layers)
    reduce = ring_all_reduce(p, _w(layers) * s.delta, s.alpha, s.beta)
    halos = sum(_halo_seconds(layer, grid, s.batch, s) for layer in layers)
    memory = 2 * s.delta * (s.batch * _a(layers) / p + _w(layers))
    return Cost(compute, s.iterations * (reduce + 2 * halos), memory)


def layer(groups: Sequence[Sequence[Record]], s: Setting) -> Cost:
    """ParaDL, layer without pipelining: one group of layers works at a time."""
    everything = [record for group in groups for record in group]
    compute = s.samples * _c1(everything) + s.iterations * _u(everything)
    sends = sum(message(s.alpha, s.beta, s.batch * group[-1].y * s.delta) for group in groups[:-1])
    return Cost(compute, s.iterations * 2 * sends, _stage_memory(groups, s))


def pipeline(groups: Sequence[Sequence[Record]], s: Setting, micro_batches: int) -> Cost:
    """ParaDL, Table III, layer with pipelining (GPipe): p groups, S micro-batches."""
    p, parts = len(groups), micro_batches
    forward = max(sum(r.forward_seconds for r in group) for group in groups)
    backward = max(sum(r.backward_seconds for r in group) for group in groups)
    update = max(_u(group) for group in groups)
    compute = s.samples * (p + parts - 1) / parts * (forward + backward) + s.iterations * update
    sends = [message(s.alpha, s.beta, s.batch / parts * g[-1].y * s.delta) for g in groups[:-1]]
    communication = 2 * s.iterations * (p + parts - 2) * max(sends, default=0.0)
    return Cost(compute, communication, _stage_memory(groups, s))


def filters(layers: Sequence[Record], s: Setting, p: int) -> Cost:
    """ParaDL, Table III, filter: every PE has 1/p of the filters and all activations."""
    compute = s.samples / p * _c1(layers) + s.iterations / p * _u(layers)
    memory = 2 * s.delta * (s.batch * _a(layers) + _w(layers) / p)
    return Cost(compute, s.iterations * _layerwise(layers, s, s.batch, p, p), memory)


def channels(layers: Sequence[Record], s: Setting, p: int) -> Cost:
    """ParaDL, Table III, channel: as filter, with all-reduce forwards and all-gather backwards."""
    return filters(layers, s, p)


def data_filters(layers: Sequence[Record], s: Setting, p1: int, p2: int) -> Cost:
    """ParaDL, Table III, data+filter: p1 data groups whose p2 PEs split the filters."""
    p = p1 * p2
    compute = s.samples / p * _c1(layers) + s.iterations / p2 * _u(layers)
    inside = _layerwise(layers, s, s.batch, p2, p)
    alpha, beta = s.outer
    between = 2 * (p1 - 1) * (alpha + _w(layers) / p * s.delta * beta)
    memory = 2 * s.delta * (s.batch / p1 * _a(layers) + _w(layers) / p2)
    return Cost(compute, s.iterations * (inside + between), memory)


def data_spatial(
    layers: Sequence[Record], s: Setting, p1: int, grid: Sequence[int], split_layers: int | None = None
) -> Cost:
    """ParaDL, data+spatial as its script computes it: tiles inside a group for the first layers.

    Args:
        layers: of the network.
        s: the setting; its outer network joins the groups.
        p1: data groups.
        grid: tiles within a group.
        split_layers: how many layers are tiled before the tiles are gathered; default all.
    """
    p2 = math.prod(grid)
    count = len(layers) if split_layers is None else split_layers
    tiled, rest = layers[:count], layers[count:]
    compute = s.samples / p1 * (_c1(tiled) / p2 + _c1(rest)) + s.iterations * _u(layers)
    share = s.batch / p1
    halos = 2 * sum(_halo_seconds(record, grid, share, s) for record in tiled)
    gather = 0.0
    if rest and tiled:
        gather = ring_all_gather(p2, share * tiled[-1].y / p2 * s.delta, s.alpha, s.beta)
    inside = ring_all_reduce(p2, _w(layers) * s.delta, s.alpha, s.beta)
    leaders = ring_all_reduce(p1, _w(layers) * s.delta, *s.outer)
    memory = 2 * s.delta * (share * (_a(tiled) / p2 + _a(rest)) + _w(layers))
    return Cost(compute, s.iterations * (halos + gather + inside + leaders), memory)


def _layerwise(layers: Sequence[Record], s: Setting, batch: float, p2: int, p: int) -> float:
    """Return one all-gather and one all-reduce of every layer but the last, over p2 PEs."""
    return 3 * (p2 - 1) * sum(s.alpha + batch * r.y / p * s.delta * s.beta for r in layers[:-1])


def _halo_seconds(record: Record, grid: Sequence[int], batch: float, s: Setting) -> float:
    """Return the exchange of one layer with one neighbour: the value forwards, its gradient backwards."""
    elements = record.halo_x(grid) + record.halo_y(grid)
    if not elements:
        return 0.0
    return 2 * s.alpha + batch * elements * s.delta * s.beta


def _stage_memory(groups: Sequence[Sequence[Record]], s: Setting) -> float:
    return 2 * s.delta * max(s.batch * _a(group) + _w(group) for group in groups)


def _w(layers: Sequence[Record]) -> float:
    return sum(r.w for r in layers)


def _a(layers: Sequence[Record]) -> float:
    return sum(r.x + r.y for r in layers)


def _c1(layers: Sequence[Record]) -> float:
    return sum(r.forward_seconds + r.backward_seconds for r in layers)


def _u(layers: Sequence[Record]) -> float:
    return sum(r.update_seconds for r in layers)
