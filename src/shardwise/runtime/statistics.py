"""Running statistics of norms, folded at the end of a step as one device would have folded them.

One device updates its running statistics r once per micro-batch, in order; with momentum f

    r <- (1 - f) r + f s0;   r <- (1 - f) r + f s1;   ...        s0, s1 ... statistics of the micro-batches

Where micro-batches flow both ways no rank sees all of them. So during the step every layer updates a
scratch buffer that starts at zero for each micro-batch and ends as c = f s; at the end the holders of a
layer exchange their c and fold all of them in the order of the micro-batches, r <- (1 - f) r + c, each on
its own and all alike. A forward pass that is repeated leaves no trace, because only `record` keeps one.

Meanings:  sync      statistics of a micro-batch over all tiles and replicas, folded as above
           deferred  the same, but folded once: the statistics of the whole mini-batch (one update per step)
           local     each rank normalises with its own; the first rank's are folded on all of them
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.geometry import Box
from shardwise.graph import Layer
from shardwise.plan import Direction, direction_of
from shardwise.program.lowered import Lowered
from shardwise.program.norms import has_statistics
from shardwise.program.ops import Regrid, StageProgram
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.store import Store


@dataclass(frozen=True)
class Tracked:
    """One pair of running statistics: their names, and how often a forward pass updates them."""

    layer: Layer
    mean: str
    var: str
    counter: str | None
    calls: int

    @property
    def momentum(self) -> float | None:
        """Return the share of new statistics, or None for a plain average over all steps."""
        value: float | None = self.layer.attributes["momentum"]
        return value

    @property
    def pixels(self) -> int:
        """Return over how many values of each sample the statistics run."""
        return math.prod(self.layer.shape[2:])


def tracked(program: StageProgram) -> list[Tracked]:
    """Return the running statistics that a forward pass of a stage updates, in order."""
    found: dict[str, Tracked] = {}
    for op in program.ops:
        if isinstance(op, Regrid) or not has_statistics(op.layer):
            continue
        names = {operand.role: operand.source for operand in op.layer.operands}
        if "running_mean" in names:
            mean = names["running_mean"]
            calls = found[mean].calls + 1 if mean in found else 1
            counter = names.get("num_batches_tracked")
            found[mean] = Tracked(op.layer, mean, names["running_var"], counter, calls)
    return list(found.values())


def needs_folding(lowered: Lowered, ranks: int) -> bool:
    """Tell whether updates in the order of execution would not be those of one device."""
    local = lowered.plan.batch_norm == "local" and ranks > 1
    return lowered.program.bidirectional or lowered.plan.batch_norm == "deferred" or local


@dataclass
class _Scratch:
    """What one stage of this rank updates instead of the running statistics, in one flat tensor."""

    flat: Tensor
    counters: Tensor
    views: dict[str, Tensor]

    @staticmethod
    def make(program: StageProgram, member: int, store: Store) -> _Scratch:
        entries = tracked(program)
        names = [name for entry in entries for name in (entry.mean, entry.var)]
        shapes = [program.buffers[name].box(member).shape for name in names]
        dtype = store.tensors[names[0]].dtype if names else torch.float32
        flat = torch.zeros(sum(map(math.prod, shapes)), dtype=dtype, device=store.device)
        pieces = torch.split_with_sizes(flat, [math.prod(shape) for shape in shapes])
        counted = [entry.counter for entry in entries if entry.counter is not None]
        counters = torch.zeros(len(counted), dtype=torch.int64, device=store.device)
        views = {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}
        views |= dict(zip(counted, counters.unbind(), strict=True))
        return _Scratch(flat, counters, views)

    def take(self) -> Tensor:
        """Return what one micro-batch left, and start anew."""
        row = self.flat.clone()
        # Through `.data`: batch norm lists its running statistics among what backward needs, and never reads
        # them there, so autograd must not take this for a change of them.
        self.flat.data.zero_()
        self.counters.zero_()
        return row


@dataclass(frozen=True)
class _Circle:
    """The ranks that hold the same boxes of a stage's statistics, and who speaks for each micro-batch."""

    stage: int
    member: int
    ranks: tuple[int, ...]
    owners: tuple[int, ...]


class Ledger:
    """Keep the statistics of every micro-batch of a step, and fold them at its end."""

    def __init__(self, lowered: Lowered, fabric: Fabric, store: Store) -> None:
        self.lowered, self.fabric, self.store = lowered, fabric, store
        self.count = lowered.program.micro_batches
        self._scratch: dict[tuple[int, Direction], _Scratch] = {}
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._circles = list(self._find_circles())
        fabric.adopt([circle.ranks for circle in self._circles])

    def _find_circles(self) -> Iterator[_Circle]:
        mesh, plan = self.fabric.mesh, self.lowered.plan
        for stage in range(mesh.stages):
            program = self.lowered.stage(stage, 0, 0)
            names = [name for entry in tracked(program) for name in (entry.mean, entry.var)]
            if not names:
                continue
            boxes = [tuple(program.buffers[n].box(m) for n in names) for m in range(program.width)]
            for member in range(program.width):
                if boxes.index(boxes[member]) != member:
                    continue
                alike = [m for m in range(program.width) if boxes[m] == boxes[member]]
                groups = [mesh.group(r, stage, d) for r in range(mesh.data) for d in mesh.directions]
                ranks = tuple(sorted({group[m] for group in groups for m in alike}))
                owners = tuple(
                    mesh.group(self._first_replica(m), stage, direction_of(plan, m))[member]
                    for m in range(self.count)
                )
                yield _Circle(stage, member, ranks, owners)

    def _first_replica(self, micro_batch: int) -> int:
        """Return the first replica that has samples of a micro-batch."""
        for replica in range(self.fabric.mesh.data):
            lo, hi = self.lowered.samples(replica, micro_batch)
            if hi > lo:
                return replica
        return 0

    def views(self, stage: int, direction: Direction, member: int) -> dict[str, Tensor]:
        """Return the tensors that a stage updates in place of its running statistics."""
        key = (stage, direction)
        if key not in self._scratch:
            self._scratch[key] = _Scratch.make(self.lowered.stage(stage, 0, 0), member, self.store)
        return self._scratch[key].views

    def record(self, stage: int, direction: Direction, micro_batch: int) -> None:
        """Keep what the forward pass of one micro-batch found."""
        self._rows[stage, micro_batch] = self._scratch[stage, direction].take()

    def fold(self) -> None:
        """Exchange what was found, and update the running statistics of this rank."""
        # A rank that holds two parts of a stage folds each of them, from the same count.
        counted: dict[str, int] = {}
        for circle in self._circles:
            if self.fabric.rank not in circle.ranks:
                continue
            program = self.lowered.stage(circle.stage, 0, 0)
            entries = tracked(program)
            boxes = {n: program.buffers[n].box(circle.member) for e in entries for n in (e.mean, e.var)}
            table = self._table(circle, sum(box.size for box in boxes.values()), entries[0])
            self.fabric.wire(circle.ranks).all_reduce(table)
            offset = 0
            for entry in entries:
                width = boxes[entry.mean].size
                part = table[:, offset : offset + 2 * width].view(self.count, 2, width)
                self._fold(entry, part, boxes[entry.mean], counted)
                offset += 2 * width
        self._rows.clear()

    def _table(self, circle: _Circle, width: int, entry: Tracked) -> Tensor:
        dtype = self.store.tensors[entry.mean].dtype
        table = torch.zeros((self.count, width), dtype=dtype, device=self.store.device)
        for m, owner in enumerate(circle.owners):
            if owner == self.fabric.rank:
                table[m] = self._rows[circle.stage, m]
        return table

    def _samples(self, micro_batch: int) -> int:
        shares = [self.lowered.samples(r, micro_batch) for r in range(self.fabric.mesh.data)]
        return sum(hi - lo for lo, hi in shares)

    def _fold(self, entry: Tracked, rows: Tensor, box: Box, counted: dict[str, int]) -> None:
        """Fold the rows (micro-batch, mean or variance, channel) of one layer."""
        used = [m for m in range(self.count) if self._samples(m)]
        mean, var = self.store.local(entry.mean, box), self.store.local(entry.var, box)
        counter = self.store.tensors[entry.counter] if entry.counter is not None else None
        if counter is not None and entry.counter is not None:
            counter.fill_(counted.setdefault(entry.counter, int(counter)))
        shape = mean.shape
        if self.lowered.plan.batch_norm == "deferred":
            rows_of_each = self.lowered.graph[entry.layer.name].shape[0] // self.lowered.batch
            counts = [self._samples(m) * rows_of_each * entry.pixels for m in used]
            join = _whole if entry.layer.attributes.get("batch_statistics") else _mean
            rows = join(rows[used].double() / _gained(entry), counts).to(rows.dtype).unsqueeze(0)
            steps = [(0, 1)]
        else:
            steps = [(m, entry.calls) for m in used]
        for m, calls in steps:
            factor = entry.momentum
            if counter is not None:
                counter.add_(calls)
                if factor is None:
                    keep = 1.0 - calls / float(counter)
                    mean.mul_(keep).add_(rows[m, 0].view(shape) * (1.0 - keep))
                    var.mul_(keep).add_(rows[m, 1].view(shape) * (1.0 - keep))
                    continue
            factor = 0.0 if factor is None else factor
            fresh = factor if self.lowered.plan.batch_norm == "deferred" else 1.0
            mean.mul_((1.0 - factor) ** calls).add_(rows[m, 0].view(shape), alpha=fresh)
            var.mul_((1.0 - factor) ** calls).add_(rows[m, 1].view(shape), alpha=fresh)


def _gained(entry: Tracked) -> float:
    """Return how much of the new statistics a scratch buffer holds after a forward pass."""
    return 1.0 if entry.momentum is None else 1.0 - (1.0 - entry.momentum) ** entry.calls


def _mean(rows: Tensor, counts: list[int]) -> Tensor:
    """Join what instance norm keeps of several parts: means over their samples."""
    weights = torch.tensor(counts, dtype=torch.float64, device=rows.device)
    return (rows * (weights / weights.sum()).view(-1, 1, 1)).sum(0)


def _whole(rows: Tensor, counts: list[int]) -> Tensor:
    """Join means and unbiased variances of several parts to those of the whole."""
    n = torch.tensor(counts, dtype=torch.float64, device=rows.device).view(-1, 1)
    means, unbiased = rows[:, 0], rows[:, 1]
    total = n.sum()
    mean = (n * means).sum(0) / total
    squares = (unbiased * (n - 1) + n * (means - mean) ** 2).sum(0)
    return torch.stack((mean, squares / (total - 1).clamp(min=1)))
