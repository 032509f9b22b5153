"""Peak memory of a stage on each rank: what is stored, what autograd keeps, what is alive for a moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.oracle.kernels import KernelTimes
from shardwise.oracle.sizes import Sizes
from shardwise.program import StageProgram

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "messages", "buffers", "baseline")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one micro-batch of a stage needs on one rank, in bytes.

    Args:
        weights: bytes of parameters and buffers.
        trained: bytes of each trained parameter.
        kept: what lives from the end of forward to backward.
        leaving: values that leave the stage and that autograd does not keep anyway.
        arriving: values that come from outside.
        forward_peak: at the fullest moment of forward, arrivals included.
        first_backward: activations and gradients at the fullest moment of the first backward pass.
        later_backward: the same for a later one, which finds the gradients of earlier ones.
        parcels: packed parcels of the largest exchange, which stay allocated.
    """

    weights: int
    kept: int
    leaving: int
    arriving: int
    forward_peak: int
    first_backward: tuple[int, int]
    later_backward: tuple[int, int]
    parcels: int
    trained: Mapping[str, int] = field(default_factory=dict)


def footprints(
    program: StageProgram, kernels: KernelTimes | None = None, host: bool = True
) -> tuple[Footprint, ...]:
    """Return what one micro-batch of a stage needs on every rank of its group.

    `kernels` know what room computations take beyond their results; passes over tensors are compiled on a
    `host` only. Ranks that hold as much of everything share one answer.
    """
    sizes = Sizes(program, kernels, host)
    known: dict[tuple[object, ...], Footprint] = {}
    result = []
    for rank, key in enumerate(sizes.keys()):
        if key not in known:
            known[key] = _footprint(sizes, rank)
        result.append(known[key])
    return tuple(result)


def footprint(
    program: StageProgram, rank: int, kernels: KernelTimes | None = None, host: bool = True
) -> Footprint:
    """Return the same for one rank."""
    return _footprint(Sizes(program, kernels, host), rank)


def _footprint(sizes: Sizes, rank: int) -> Footprint:
    walk = _Walk(sizes, rank)
    walk.forward()
    ahead = walk.activations_at_peak
    peaks = []
    for there in (False, True):
        walk.activations_at_peak = walk.gradients_at_peak = 0
        walk.backward(there=there)
        peaks.append((walk.activations_at_peak, walk.gradients_at_peak))
    leaving = {slot: walk.row[at] for slot, at in sizes.departures if slot not in walk.saved}
    arriving = sum(walk.row[at] for _, at in sizes.arrivals)
    return Footprint(
        walk.stored,
        walk.kept,
        sum(leaving.values()),
        arriving,
        ahead,
        peaks[0],
        peaks[1],
        sizes.parcels[rank],
        walk.trained,
    )


def stage_memory(
    program: StageProgram,
    rank: int,
    *,
    optimizer_slots: float = 1.0,
    in_flight: int = 1,
    baseline_bytes: float = 0.0,
    reduced: bool = False,
) -> Mapping[str, float]:
    """Return the bytes of one rank at its fullest moment, by category.

    Args:
        program: the lowered stage.
        rank: position in the group.
        optimizer_slots: copies of the parameters that the optimizer keeps (momentum 1, Adam 2).
        in_flight: micro-batches whose activations are kept at once; gradients of earlier ones are there.
        baseline_bytes: what the process takes before the first tensor.
        reduced: whether gradients are summed with other ranks, which needs a flat copy of them.
    """
    sizes = Sizes(program)
    walk = _Walk(sizes, rank)
    walk.forward()
    walk.backward(there=in_flight > 1)
    travelling = sum(walk.trained.values()) if reduced else 0
    return {
        "weights": float(walk.stored),
        "gradients": float(walk.gradients_at_peak),
        "optimizer": optimizer_slots * sum(walk.trained.values()),
        "activations": float(walk.kept * (in_flight - 1) + walk.activations_at_peak),
        "messages": 0.0,
        "buffers": float(sizes.parcels[rank] + travelling),
        "baseline": float(baseline_bytes),
    }


class _Walk:
    """Go through a stage forwards and backwards on one rank and note the fullest moment."""

    def __init__(self, sizes: Sizes, rank: int) -> None:
        self.sizes, self.rank = sizes, rank
        self.row = [column[rank] for column in sizes.columns]
        self.trained = {name: self.row[at] for name, at in sizes.trained}
        self.stored = sum([self.row[at] for at in sizes.weights])
        self.kept = self.activations_at_peak = self.gradients_at_peak = 0
        self.added: list[int] = []
        self.saved: set[str] = set()

    def _note(self, activations: int, gradients: int) -> None:
        if activations + gradients > self.activations_at_peak + self.gradients_at_peak:
            self.activations_at_peak, self.gradients_at_peak = activations, gradients

    def forward(self) -> None:
        """Add up what autograd keeps, and what is alive until its last reader."""
        row, rank, saved = self.row, self.rank, self.saved
        steps = self.sizes.steps
        landing = {s.values[0][0]: s.makes[1] for s in steps if s.moves and s.moves.lands[rank]}
        alive = {slot: row[at] for slot, at in self.sizes.arrivals}
        moment = sum(alive.values())
        for step in steps:
            slot, at = step.makes
            self._note(int(self.kept + moment + step.room[rank][0]), 0)
            if step.moves and step.moves.lands[rank]:
                alive[slot] = alive.pop(step.values[0][0], 0)
            else:
                alive[slot] = 0 if step.view else row[landing.get(slot, at)]
                moment += alive[slot]
            amount = 0
            if step.moves:
                source, before = step.values[0]
                if source in saved and step.moves.widens[rank]:
                    # The widened tensor holds all that the tile held: what was saved of that moves there.
                    amount = row[at] - row[before]
                    saved.add(slot)
                    moment -= alive.pop(slot, 0)
            else:
                for name, where in step.keeps:
                    if name not in saved:
                        saved.add(name)
                        amount += row[where]
                        # What autograd keeps is no longer counted as alive for a moment.
                        moment -= alive.pop(name, 0)
                if step.unnamed:
                    amount += step.unnamed * step.elements[rank] // step.whole
            self.kept += amount
            self.added.append(amount)
            self._note(self.kept + moment, 0)
            for name in step.dying:
                moment -= alive.pop(name, 0)

    def backward(self, *, there: bool) -> None:
        """Let go of what was kept, and add the gradients of values and of parameters."""
        row, rank, remaining, trained = self.row, self.rank, self.kept, self.trained
        flowing = {slot: row[at] for slot, at in self.sizes.departures}
        moment = sum(flowing.values())
        stored = sum(trained.values()) if there else 0
        waiting = {} if there else dict(trained)
        for step, amount in zip(reversed(self.sizes.steps), reversed(self.added), strict=True):
            room = step.room[rank][1]
            if there and step.plain:
                # What is added to gradients that are there already is made first.
                room = max(room, sum([trained.get(name, 0) for name in step.parameters]))
            self._note(int(remaining + moment + room), stored)
            for name, at in step.flows:
                if name not in flowing:
                    flowing[name] = row[at]
                    moment += row[at]
            for name in step.parameters:
                stored += waiting.pop(name, 0)
            self._note(remaining + moment, stored)
            moment -= flowing.pop(step.makes[0], 0)
            remaining -= amount
