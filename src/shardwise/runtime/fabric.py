"""All wires of a job: every set of ranks that talks gets one process group, in one order everywhere."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from shardwise.plan.mesh import Mesh
from shardwise.plan.micro_batches import Direction
from shardwise.program.ops import Normalise, Regrid, StageProgram
from shardwise.runtime.ordered import Channel, OrderedWire, open_channels
from shardwise.runtime.session import heartbeat
from shardwise.runtime.wire import LoneWire, Post, Wire, Wires, keeps_order, wire_of

# Making a group costs a round over its ranks, so groups outlive the trainer that asked for them.
_Key = tuple[bool, tuple[int, ...]]
_groups: weakref.WeakKeyDictionary[Any, dict[_Key, Any]] = weakref.WeakKeyDictionary()


class Fabric:
    """Make and keep the wires of a mesh; only `adopt` and `open_channels` are collective over the world."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        if mesh.size != self.size:
            raise ValueError(f"the plan needs {mesh.size} ranks, the job has {self.size}")
        world = dist.group.WORLD if dist.is_initialized() else None
        self._groups = (
            {} if world is None else _groups.setdefault(world, {(False, tuple(range(self.size))): world})
        )
        self._wires: dict[_Key, Wire] = {}
        self.world = self.wire(range(self.size))
        self.ordered = self.size > 1 and keeps_order(world)

    def adopt(self, sets: Iterable[Sequence[int]], *, apart: bool = False) -> None:
        """Make groups for sets of ranks that have none yet; every rank must give the same sets.

        Sums that start when earlier ones are complete, such as those of gradients, do so at another time on
        each rank. They need groups `apart`, in which nothing else can come between them.
        """
        for key in sorted({tuple(sorted(set(ranks))) for ranks in sets}):
            if len(key) > 1 and (apart, key) not in self._groups:
                self._groups[apart, key] = self._new_group(key)
                if apart and self.rank in key:
                    wire_of(self._groups[apart, key], key).prepare_sums()

    def between_stages(self, back: bool) -> Post:
        """Return how values, or gradients on their way back, travel between stages."""
        return OrderedWire(back) if self.ordered else self.world

    def open_channels(self, channels: Iterable[Channel], device: torch.device) -> None:
        """Connect the ranks that pass messages between stages; collective over the world."""
        open_channels(channels, device, self._new_group)

    def _new_group(self, key: Sequence[int]) -> Any:
        # The groups of mpi4py watch over their making themselves.
        watch = heartbeat() if dist.get_backend() != "mpi4py" else None
        what = f"rank {self.rank}: making the group of ranks {list(key)}"
        with watch.waiting((), what) if watch is not None else nullcontext():
            return dist.new_group(list(key))

    def wire(self, ranks: Sequence[int], *, apart: bool = False) -> Wire:
        """Return the wire among some ranks of the world, peers numbered in the given order."""
        order = tuple(ranks)
        if len(order) <= 1:
            return LoneWire()
        if (apart, order) not in self._wires:
            key = (apart, tuple(sorted(order)))
            if key not in self._groups:
                raise ValueError(f"no group was made for the ranks {order}")
            self._wires[apart, order] = wire_of(self._groups[key], order)
        return self._wires[apart, order]

    def adopt_stages(self, programs: Iterable[tuple[int, StageProgram]]) -> None:
        """Make the groups that the operations of the given stages talk in."""
        sets: set[tuple[int, ...]] = set()
        for stage, program in programs:
            for direction in self.mesh.directions:
                sets.update(self._talking(stage, direction, program))
        self.adopt(sets)

    def _talking(self, stage: int, direction: Direction, program: StageProgram) -> set[tuple[int, ...]]:
        groups = [self.mesh.group(r, stage, direction) for r in range(self.mesh.data)]
        sets: set[tuple[int, ...]] = set()
        for op in program.ops:
            if isinstance(op, Regrid):
                sets.update(groups)
            elif isinstance(op, Normalise) and op.over == "group":
                sets.add(tuple(rank for group in groups for rank in group))
            elif isinstance(op, Normalise):
                sets.update(zip(*groups, strict=True))
        return sets

    def wires(self, replica: int, stage: int, direction: Direction, member: int) -> Wires:
        """Return the wires of one stage; those that its operations never use are not connected."""
        groups = [self.mesh.group(r, stage, direction) for r in range(self.mesh.data)]
        return Wires(
            group=self._connected(groups[replica]),
            group_and_replicas=self._connected([rank for group in groups for rank in group]),
            replicas=self._connected([group[member] for group in groups]),
        )

    def _connected(self, ranks: Sequence[int]) -> Wire:
        return self.wire(ranks) if (False, tuple(sorted(ranks))) in self._groups else LoneWire()
