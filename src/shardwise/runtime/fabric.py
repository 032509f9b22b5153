"""All wires of a job: every set of ranks that talks gets one process group, in one order everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from shardwise.plan.mesh import Mesh
from shardwise.plan.micro_batches import Direction
from shardwise.runtime.wire import LoneWire, Wire, Wires, wire_of


class Fabric:
    """Make and keep the wires of a mesh; constructing it is collective over the world."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        if mesh.size != self.size:
            raise ValueError(f"the plan needs {mesh.size} ranks, the job has {self.size}")
        self._groups: dict[tuple[int, ...], object] = {}
        self._wires: dict[tuple[int, ...], Wire] = {}
        for ranks in self._sets():
            self._prepare(ranks)
        self.world = self.wire(range(self.size))

    def _sets(self) -> list[tuple[int, ...]]:
        mesh = self.mesh
        sets: list[tuple[int, ...]] = [tuple(range(self.size))]
        for stage in range(mesh.stages):
            for direction in mesh.directions:
                groups = [mesh.group(r, stage, direction) for r in range(mesh.data)]
                sets += groups
                sets.append(tuple(rank for group in groups for rank in group))
                sets += [tuple(group[m] for group in groups) for m in range(mesh.widths[stage])]
            sets += [mesh.slice_group(stage, m) for m in range(mesh.widths[stage])]
            sets.append(mesh.reduction_group(stage))
        return sets

    def _prepare(self, ranks: Sequence[int]) -> None:
        key = tuple(sorted(set(ranks)))
        if key in self._groups or len(key) <= 1:
            return
        self._groups[key] = dist.group.WORLD if len(key) == self.size else dist.new_group(list(key))

    def wire(self, ranks: Sequence[int]) -> Wire:
        """Return the wire among some ranks of the world, peers numbered in the given order."""
        order = tuple(ranks)
        if len(order) <= 1:
            return LoneWire()
        if order not in self._wires:
            key = tuple(sorted(order))
            if key not in self._groups:
                raise ValueError(f"no group was made for the ranks {order}")
            self._wires[order] = wire_of(self._groups[key], order)
        return self._wires[order]

    def adopt(self, sets: Sequence[Sequence[int]]) -> None:
        """Make groups for further sets of ranks; collective, with the same sets on every rank."""
        for ranks in sets:
            self._prepare(ranks)

    def wires(self, replica: int, stage: int, direction: Direction, member: int) -> Wires:
        """Return the wires of one stage."""
        mesh = self.mesh
        groups = [mesh.group(r, stage, direction) for r in range(mesh.data)]
        return Wires(
            group=self.wire(groups[replica]),
            group_and_replicas=self.wire([rank for group in groups for rank in group]),
            replicas=self.wire([group[member] for group in groups]),
        )
