"""Which rank of the world plays which part.

Ranks of one group are adjacent, then the stages of a replica, then the replicas:

    data=2 stages=2|1        world rank   0 1 2   3 4 5
                             replica      0 0 0   1 1 1
                             position     0 1 2   0 1 2
                             stage down   0 0 1   0 0 1
                             stage up     1 0 0   1 0 0     (bi-directional schedules only)

So the ranks that talk most (the tiles of a group, in every layer) sit on one node, then those of
neighbouring stages. Where nodes are so small that groups would straddle them, wide groups are placed
first, each on the first node with room for it, if that leaves fewer groups on more than one node.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from shardwise.plan.micro_batches import Direction, is_bidirectional
from shardwise.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Role:
    """The part of a position in one direction: `member` is the index within the group of the stage."""

    stage: int
    direction: Direction
    member: int


@dataclass(frozen=True)
class Mesh:
    """Arrange replicas of a pipeline whose stages are `widths` ranks wide over the ranks of the world."""

    data: int
    widths: tuple[int, ...]
    bidirectional: bool = False
    ranks_per_node: int | None = None

    @property
    def positions(self) -> int:
        """Return the number of ranks of one replica."""
        return sum(self.widths)

    @property
    def size(self) -> int:
        """Return the number of ranks of the world."""
        return self.data * self.positions

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return len(self.widths)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Return the directions in which micro-batches flow."""
        return (Direction.DOWN, Direction.UP) if self.bidirectional else (Direction.DOWN,)

    def world_rank(self, replica: int, position: int) -> int:
        """Return the rank of the world that plays `position` in a replica."""
        return self._table[replica * self.positions + position]

    def place(self, rank: int) -> tuple[int, int]:
        """Return the replica and the position of a rank of the world."""
        return divmod(self._inverse[rank], self.positions)

    def member_positions(self, stage: int, direction: Direction = Direction.DOWN) -> tuple[int, ...]:
        """Return the positions that play a stage, in the order of its layouts."""
        first = self._offsets[stage]
        down = range(first, first + self.widths[stage])
        if direction is Direction.DOWN:
            return tuple(down)
        return tuple(self.positions - 1 - p for p in down)

    def group(self, replica: int, stage: int, direction: Direction = Direction.DOWN) -> tuple[int, ...]:
        """Return the ranks of the world that share a stage of a replica, in the order of its layouts."""
        return tuple(self.world_rank(replica, p) for p in self.member_positions(stage, direction))

    def roles(self, position: int) -> tuple[Role, ...]:
        """Return what a position plays: one stage, or one in each direction."""
        mirrored = {Direction.DOWN: position, Direction.UP: self.positions - 1 - position}
        parts = [(d, *self._down[mirrored[d]]) for d in self.directions]
        return tuple(Role(stage, direction, member) for direction, stage, member in parts)

    def hosted(self, position: int) -> tuple[int, ...]:
        """Return the stages whose parameters a position holds, each once, in rising order."""
        return tuple(sorted({role.stage for role in self.roles(position)}))

    def holders(self, stage: int) -> tuple[int, ...]:
        """Return the positions that hold a stage in either direction, in rising order."""
        return tuple(sorted({p for d in self.directions for p in self.member_positions(stage, d)}))

    def reduction_group(self, stage: int) -> tuple[int, ...]:
        """Return every rank of the world that holds a stage, over all replicas and directions."""
        return tuple(sorted(self.world_rank(r, p) for r in range(self.data) for p in self.holders(stage)))

    def slice_group(self, stage: int, member: int) -> tuple[int, ...]:
        """Return every rank of the world that plays one member of a stage, and so holds the same slices."""
        groups = (self.group(r, stage, d) for r in range(self.data) for d in self.directions)
        return tuple(sorted({group[member] for group in groups}))

    def nodes(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the nodes that some ranks of the world sit on; one node if their size is not known."""
        if self.ranks_per_node is None:
            return (0,)
        return tuple(sorted({rank // self.ranks_per_node for rank in ranks}))

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.widths))

    @cached_property
    def _down(self) -> tuple[tuple[int, int], ...]:
        """Return stage and member of every position, going down."""
        return tuple((s, i) for s, width in enumerate(self.widths) for i in range(width))

    @cached_property
    def _table(self) -> tuple[int, ...]:
        """Return the rank of the world for every (replica, position), replicas slowest."""
        natural = tuple(range(self.size))
        if self.ranks_per_node is None or not self._straddling(natural):
            return natural
        packed = self._packed(self.ranks_per_node)
        return packed if self._straddling(packed) < self._straddling(natural) else natural

    @cached_property
    def _inverse(self) -> dict[int, int]:
        return {rank: i for i, rank in enumerate(self._table)}

    def _straddling(self, table: tuple[int, ...]) -> int:
        """Count the groups that a table spreads over more nodes than they need."""
        node = self.ranks_per_node or self.size
        count = 0
        for replica, stage, direction in itertools.product(
            range(self.data), range(self.stages), self.directions
        ):
            positions = self.member_positions(stage, direction)
            used = {table[replica * self.positions + p] // node for p in positions}
            count += len(used) > -(-len(positions) // node)
        return count

    def _packed(self, node: int) -> tuple[int, ...]:
        """Place the widest groups first, each on the first node with room for all of it."""
        free = [list(range(a, min(a + node, self.size))) for a in range(0, self.size, node)]
        groups = sorted(
            ((replica, stage) for replica in range(self.data) for stage in range(self.stages)),
            key=lambda group: -self.widths[group[1]],
        )
        table = [0] * self.size
        for replica, stage in groups:
            width = self.widths[stage]
            home = next((slots for slots in free if len(slots) >= width), None)
            for position in self.member_positions(stage):
                slots = home if home is not None else next(s for s in free if s)
                table[replica * self.positions + position] = slots.pop(0)
        return tuple(table)


def mesh_of(plan: Plan, ranks_per_node: int | None = None) -> Mesh:
    """Return the arrangement of a plan's ranks."""
    widths = tuple(split.width for split in plan.stages)
    return Mesh(plan.data, widths, is_bidirectional(plan.schedule), ranks_per_node)
