"""How many bytes the fullest rank of a plan holds at least, before its own stages are lowered.

What a pass keeps grows with its samples from nothing or more, so that of a pass with fewer of them at least
that part is there. Room for kernels, parcels of exchanges and messages under way are left out, and where
ranks share samples out, passes with fewer of them count for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.oracle.memory import Footprint, footprint
from shardwise.oracle.search.relaxed import Relaxed
from shardwise.oracle.search.work import Passes
from shardwise.program import Regrid
from shardwise.program.actions import Act

_ROUNDING = 1 - 1e-6


class Holdings:
    """What the ranks of a lowered step hold in each of its passes."""

    def __init__(self, passes: Passes, host: bool) -> None:
        self.passes, self.host = passes, host
        self._known: dict[tuple[int, int], tuple[Footprint, bool]] = {}

    def of(self, stage: int, member: int, samples: int) -> tuple[Footprint, float]:
        """Return the bytes of the step's own passes, and which part of them one with so many samples has."""
        key, own = (stage, member), self.passes.samples
        if key not in self._known:
            program = self.passes.programs[stage]
            self._known[key] = (footprint(program, member, None, self.host), self._shares(*key))
        found, shares = self._known[key]
        part = 1.0 if samples >= own else 0.0 if shares else samples / own
        return found, part

    def _shares(self, stage: int, member: int) -> bool:
        """Tell whether a rank has only some samples of a value."""
        whole = (0, self.passes.samples)
        for op in self.passes.programs[stage].ops:
            for held in (op.source, op.makes) if isinstance(op, Regrid) else (*op.reads, op.makes):
                box = held.layout.box(member)
                if box.ndim and held.spec.shape[0] == whole[1] and box.ranges[0] != whole:
                    return True
        return False


@dataclass
class _Moment:
    """The bytes of activations and of gradients, and the most of both together so far."""

    activations: float = 0.0
    gradients: float = 0.0
    most: float = 0.0

    def note(self, activations: float, gradients: float) -> None:
        self.most = max(self.most, activations + gradients)


def least_bytes(plan: Relaxed, holdings: Holdings, optimizer_slots: float) -> float:
    """Return the bytes of the fullest of the first ranks of each group."""
    mesh = plan.mesh
    first = sorted({mesh.member_positions(stage)[0] for stage in range(mesh.stages)})
    fullest = max(_position(plan, holdings, optimizer_slots, position) for position in first)
    return (fullest + plan.machine.device.baseline_bytes) * _ROUNDING


def _position(plan: Relaxed, holdings: Holdings, optimizer_slots: float, position: int) -> float:
    program = plan.step.program
    members = {(role.stage, role.direction): role.member for role in plan.mesh.roles(position)}
    held = {stage: holdings.of(stage, member, 1)[0] for (stage, _), member in members.items()}
    trained = {stage: float(sum(found.trained.values())) for stage, found in held.items()}
    buckets = [bucket for bucket, _, _ in plan.sums[position]]
    gathered = {name for bucket in buckets if bucket.gathered_bytes for name in bucket.names}
    ends = Act.BACKWARD_WEIGHT if program.splits_backward else Act.BACKWARD
    actions = program.actions[position]
    last = {a.stage: i for i, a in enumerate(actions) if a.act is ends}
    now, summed = _Moment(), set[int]()
    for i, action in enumerate(actions):
        if action.act not in (Act.FORWARD, Act.BACKWARD, Act.BACKWARD_WEIGHT):
            continue
        stage, samples = action.stage, plan.parts[action.micro_batch][0]
        size, part = holdings.of(stage, members[stage, action.direction], samples)
        if action.act is Act.FORWARD:
            now.note(now.activations + part * size.forward_peak, now.gradients)
            now.activations += part * (size.kept + size.leaving)
        elif action.act is Act.BACKWARD:
            later = stage in summed
            activations, gradients = size.later_backward if later else size.first_backward
            others = now.gradients - (trained[stage] if later else 0.0)
            # With no samples known of, gradients of weights are there in the end nevertheless.
            there = gradients if part else 0.0
            now.note(now.activations + part * (activations - size.kept), others + there)
            if not later:
                summed.add(stage)
                now.gradients += trained[stage]
            now.activations -= part * (size.leaving + (0 if program.splits_backward else size.kept))
        else:
            now.activations -= part * size.kept
        now.note(now.activations, now.gradients)
        if last.get(stage) == i:
            now.gradients -= sum(n for name, n in held[stage].trained.items() if name in gathered)
    weights = sum(found.weights for found in held.values())
    travelling = sum(bucket.gathered_bytes for bucket in buckets)
    every = {name: n for found in held.values() for name, n in found.trained.items()}
    return weights + optimizer_slots * sum(every.values()) + now.most + travelling
