"""The program: for every rank of a replica the list of actions of one training step.

A list says in which order a rank works, and what must have arrived before it goes on:

    RECEIVE        the value of an edge must be there; the message itself is posted long before
    FORWARD        one stage, one micro-batch
    SEND           start to send the value of an edge to the group of `edge.target`; never waits
    RECEIVE_GRAD   the gradient of an edge must be there (on the rank that made the value)
    BACKWARD       one stage, one micro-batch; in programs with BACKWARD_WEIGHT only its input part
    SEND_GRAD      start to send the gradient of an edge back to the group of `edge.source`
    BACKWARD_WEIGHT  the weights' part of a backward that was split in two
    REDUCE         start to sum the gradients of a stage over all ranks that hold it; never waits
    STEP           wait for all sums, then update the weights

All ranks of a group execute the same list, unless they host different stages in the two directions.

Messages are matched by (edge, micro-batch, direction, value or gradient). Between one pair of ranks they are
received in the order in which they are sent, except under `bidirectional`, where a value of one direction
may overtake a gradient of the other: a transport without tags needs a channel for each of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shardwise.plan.edges import Edge
from shardwise.plan.micro_batches import Direction


class Act(StrEnum):
    """What an action does."""

    RECEIVE = "receive"
    FORWARD = "forward"
    SEND = "send"
    RECEIVE_GRAD = "receive gradient"
    BACKWARD = "backward"
    SEND_GRAD = "send gradient"
    BACKWARD_WEIGHT = "backward weight"
    REDUCE = "reduce"
    STEP = "step"


COMPUTE = frozenset({Act.FORWARD, Act.BACKWARD, Act.BACKWARD_WEIGHT})
_LETTERS = {
    Act.RECEIVE: "R",
    Act.FORWARD: "F",
    Act.SEND: "S",
    Act.RECEIVE_GRAD: "r",
    Act.BACKWARD: "B",
    Act.SEND_GRAD: "s",
    Act.BACKWARD_WEIGHT: "W",
    Act.REDUCE: "REDUCE",
    Act.STEP: "STEP",
}
_ARROWS = {Direction.DOWN: "↓", Direction.UP: "↑"}


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list.

    Args:
        act: what is done.
        stage: the stage that the rank plays here; -1 for STEP.
        micro_batch: its number within the replica; -1 for REDUCE and STEP, which are once per step.
        direction: which way the micro-batch flows; REDUCE (both directions together) and STEP say DOWN.
        edge: what is sent or received, else None.
    """

    act: Act
    stage: int = -1
    micro_batch: int = -1
    direction: Direction = Direction.DOWN
    edge: Edge | None = None

    def describe(self) -> str:
        """Return what is done in words, for messages to the user."""
        if self.act is Act.STEP:
            return "the update of the weights"
        what = f"{self.act.value} of {self.edge.value} in" if self.edge else f"{self.act.value} of"
        part = f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        return f"{what} stage {self.stage}{part}"

    def __str__(self) -> str:
        letter = _LETTERS[self.act]
        if self.act is Act.STEP:
            return letter
        if self.act is Act.REDUCE:
            return f"{letter}{self.stage}"
        edge = f"({self.edge})" if self.edge else ""
        return f"{letter}{self.stage}.{self.micro_batch}{_ARROWS[self.direction]}{edge}"


@dataclass(frozen=True)
class Program:
    """What the ranks of one replica do in a step; all replicas do the same.

    Args:
        stages: how many stages the network is cut into.
        widths: how many ranks share each stage.
        data: how many replicas there are.
        micro_batches: into how many parts a replica's share of the mini-batch is cut.
        schedule: the name of the schedule.
        edges: the values that cross between stages, in the order in which they are sent and received.
        actions: the list of each rank of a replica; stage 0 plays on the first `widths[0]` ranks and so
            on; going up, the rank that plays position r is rank R-1-r.
        bidirectional: whether there are two directions.
        training: whether there are backward passes and an update, or only forward passes.
    """

    stages: int
    widths: tuple[int, ...]
    data: int
    micro_batches: int
    schedule: str
    edges: tuple[Edge, ...]
    actions: tuple[tuple[Action, ...], ...]
    bidirectional: bool = False
    training: bool = True

    @property
    def ranks(self) -> int:
        """Return the number of ranks of one replica."""
        return sum(self.widths)

    @property
    def splits_backward(self) -> bool:
        """Tell whether every backward pass has a weights' part of its own."""
        return self.training and self.schedule == "zero-bubble"

    def __str__(self) -> str:
        """Show the computations of every rank, one line each, without the messages."""
        keep = COMPUTE | {Act.REDUCE, Act.STEP}
        lines = [" ".join(str(a) for a in actions if a.act in keep) for actions in self.actions]
        return "\n".join(f"rank {r}: {line}" for r, line in enumerate(lines))


__all__ = ["COMPUTE", "Act", "Action", "Direction", "Edge", "Program"]
