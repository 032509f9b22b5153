"""Who holds what: for every parameter and buffer, the box of it that each rank of the world keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.geometry import Box, Layout
from shardwise.plan import Direction, Mesh
from shardwise.program.lowered import Lowered
from shardwise.program.ops import StageProgram

Holdings = Mapping[str, Mapping[int, Box]]


@dataclass(frozen=True)
class Part:
    """One rank's part in one stage: which member of its group it is."""

    stage: int
    replica: int
    direction: Direction
    member: int
    rank: int


@dataclass(frozen=True)
class Placement:
    """The state of the model over the ranks of the world.

    Args:
        parameters, buffers: name -> rank -> the box that the rank keeps.
        order: the names of each stage's parameters in the order in which backward passes complete them.
        shapes: the whole shape of each of them.
    """

    parameters: Holdings
    buffers: Holdings
    order: tuple[tuple[str, ...], ...]
    shapes: Mapping[str, tuple[int, ...]]

    @cached_property
    def held(self) -> Holdings:
        """Return parameters and buffers together."""
        return {**self.parameters, **self.buffers}

    def sharers(self, name: str, box: Box) -> tuple[int, ...]:
        """Return the ranks that keep exactly this box, in rising order."""
        return tuple(sorted(rank for rank, own in self.held[name].items() if own == box))

    def owner(self, name: str, box: Box) -> int:
        """Return the one rank that speaks for a box, where each value must count once."""
        return self.sharers(name, box)[0]

    def sets(self) -> list[tuple[int, ...]]:
        """Return every set of ranks that shares a parameter, in one order everywhere."""
        found = set()
        for name, boxes in self.parameters.items():
            for box in set(boxes.values()):
                ranks = self.sharers(name, box)
                if len(ranks) > 1 and not box.empty:
                    found.add(ranks)
        return sorted(found)


def parts(mesh: Mesh) -> Iterator[Part]:
    """Yield every part that any rank plays, last stages first."""
    for stage in reversed(range(mesh.stages)):
        for replica in range(mesh.data):
            for direction in mesh.directions:
                for member, rank in enumerate(mesh.group(replica, stage, direction)):
                    yield Part(stage, replica, direction, member, rank)


def place(lowered: Lowered, mesh: Mesh) -> Placement:
    """Find out what every rank keeps; `lowered` must have samples in its first micro-batch."""
    graph = lowered.graph
    programs = [lowered.stage(stage, 0, 0) for stage in range(mesh.stages)]
    order: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for program in reversed(programs):
        order.append(tuple(name for name in reversed(program.parameters) if name not in seen))
        seen.update(program.parameters)
    plays = list(parts(mesh))
    parameters = _holdings(plays, [program.parameters for program in programs])
    known = [{n: lay for n, lay in p.buffers.items() if n in graph.buffers} for p in programs]
    buffers = _holdings(plays, known)
    specs = {**graph.parameters, **graph.buffers}
    shapes = {name: tuple(specs[name].shape) for name in (*parameters, *buffers)}
    whole = {name: Box.whole(shape) for name, shape in shapes.items()}
    return Placement(_agreed(parameters, whole), _agreed(buffers, whole), tuple(order), shapes)


def _holdings(plays: Sequence[Part], layouts: Sequence[Mapping[str, Layout]]) -> dict[str, dict[int, Box]]:
    result: dict[str, dict[int, Box]] = {}
    for part in plays:
        for name, layout in layouts[part.stage].items():
            boxes = result.setdefault(name, {})
            box = layout.box(part.member)
            boxes[part.rank] = boxes[part.rank].hull(box) if part.rank in boxes else box
    return result


def _agreed(holdings: Mapping[str, Mapping[int, Box]], whole: Mapping[str, Box]) -> Holdings:
    """Let all holders keep everything where boxes overlap without being equal.

    So it is with a weight that a stage in the middle of a bi-directional pipeline cuts by filters: a rank
    plays another member on the way back, and keeps the parts of both.
    """
    result = {}
    for name, boxes in holdings.items():
        distinct = list({box for box in boxes.values() if not box.empty})
        clash = any(a.meets(b) for i, a in enumerate(distinct) for b in distinct[:i])
        result[name] = dict.fromkeys(boxes, whole[name]) if clash else dict(boxes)
    return result


def programs_of(lowered: Lowered, mesh: Mesh) -> Iterator[tuple[int, StageProgram]]:
    """Yield the distinct programs of every stage: micro-batches of different sizes have their own."""
    seen: set[int] = set()
    for stage in range(mesh.stages):
        for replica in range(mesh.data):
            for micro_batch in range(lowered.program.micro_batches):
                program = lowered.stage(stage, replica, micro_batch)
                if id(program) not in seen:
                    seen.add(id(program))
                    yield stage, program
