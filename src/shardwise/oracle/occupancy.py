"""Peak memory of every rank over a step: which micro-batches are alive when, along the actions."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.oracle.memory import Footprint
from shardwise.oracle.reductions import shelf_bytes
from shardwise.oracle.walk import Walk
from shardwise.program.actions import Act, Action

# The runtime posts so many receives ahead.
_AHEAD = 4


def step_memory(
    walk: Walk, position: int, *, optimizer_slots: float = 1.0, baseline_bytes: float = 0.0
) -> Mapping[str, float]:
    """Return the bytes of one position at its fullest moment, by category.

    Args:
        walk: the priced step.
        position: in a replica.
        optimizer_slots: copies of the parameters that the optimizer keeps.
        baseline_bytes: what the process takes before the first tensor.
    """
    held = walk.footprints(position)
    trained = {n: size for f in held.values() for n, size in f.trained.items()}
    if position not in walk.moments:
        walk.moments[position] = _Alive(walk, position).fullest()
    fullest = walk.moments[position]
    buckets = walk.buckets[position]
    travelling = sum(b.gathered_bytes for b in buckets) + shelf_bytes(buckets, walk.mesh, walk.machine)
    return {
        "weights": float(sum(f.weights for f in held.values())),
        "gradients": float(fullest[1]),
        "optimizer": optimizer_slots * sum(trained.values()),
        "activations": float(fullest[0]),
        "messages": float(fullest[2]),
        "buffers": float(sum(f.parcels for f in held.values()) + travelling),
        "baseline": float(baseline_bytes),
    }


class _Alive:
    """Go through a position's actions and note the fullest moment: activations, gradients, messages."""

    def __init__(self, walk: Walk, position: int) -> None:
        self.walk, self.position = walk, position
        self.rank = walk.mesh.world_rank(0, position)
        self.actions = walk.lowered.program.actions[position]
        self.plan = walk.lowered.plan
        self.splits = walk.lowered.program.splits_backward
        self.peak = (0.0, 0.0, 0.0)
        self.activations = self.gradients = 0.0
        self.messages: dict[object, float] = {}
        self.summed: set[int] = set()
        ends = Act.BACKWARD_WEIGHT if self.splits else Act.BACKWARD
        self.last = {action.stage: i for i, action in enumerate(self.actions) if action.act is ends}
        gathered = {name for b in walk.buckets[position] if b.gathered_bytes for name in b.names}
        self.gathered = {
            stage: sum(size for name, size in f.trained.items() if name in gathered)
            for stage, f in walk.footprints(position).items()
        }

    def fullest(self) -> tuple[float, float, float]:
        """Return the bytes of the three kinds when their sum is largest."""
        for index, action in enumerate(self.actions):
            if action.act in (Act.RECEIVE, Act.RECEIVE_GRAD):
                self._post(index)
            elif action.act in (Act.SEND, Act.SEND_GRAD):
                self._send(action)
            elif action.act is Act.FORWARD:
                self._forward(action)
            elif action.act is Act.BACKWARD:
                self._backward(action)
            elif action.act is Act.BACKWARD_WEIGHT:
                self.activations -= self._of(action).kept
            if self.last.get(action.stage) == index:
                # Gathered gradients live on in the buckets, which are counted as buffers.
                self.gradients -= self.gathered.get(action.stage, 0.0)
        return self.peak

    def _of(self, action: Action) -> Footprint:
        return self.walk.footprints(self.position, action.micro_batch)[action.stage]

    def _note(self, activations: float, gradients: float) -> None:
        messages = sum(self.messages.values())
        if activations + gradients + messages > sum(self.peak):
            self.peak = (activations, gradients, messages)

    def _arrives(self, action: Action) -> float:
        assert action.edge is not None
        back = action.act is Act.RECEIVE_GRAD
        crossings = self.walk.crossing(action.edge, 0, action.micro_batch, back)
        return sum(c.received.get(self.rank, 0.0) for c in crossings)

    def _post(self, index: int) -> None:
        """Allocate buffers for this and the next receives."""
        ahead = 0
        for action in self.actions[index:]:
            if action.act in (Act.RECEIVE, Act.RECEIVE_GRAD):
                key = (action.act, action.stage, action.edge, action.micro_batch)
                if key not in self.messages:
                    self.messages[key] = self._arrives(action)
                ahead += 1
                if ahead == _AHEAD:
                    break
        self._note(self.activations, self.gradients)

    def _send(self, action: Action) -> None:
        """Keep what was packed until the next message of the same edge replaces it."""
        assert action.edge is not None
        back = action.act is Act.SEND_GRAD
        crossings = self.walk.crossing(action.edge, 0, action.micro_batch, back)
        packed = sum(
            p.nbytes for c in crossings for p in c.parcels if p.source == self.rank and (back or c.packing)
        )
        self.messages[action.act, action.edge] = packed
        self._note(self.activations, self.gradients)

    def _received(self, action: Action, act: Act) -> None:
        """Let go of the arrivals: from now on the pass itself counts them."""
        for key in [k for k in self.messages if isinstance(k, tuple) and k[0] is act and len(k) == 4]:
            if key[1] == action.stage and key[3] == action.micro_batch:
                del self.messages[key]

    def _forward(self, action: Action) -> None:
        size = self._of(action)
        self._received(action, Act.RECEIVE)
        self._note(self.activations + size.forward_peak, self.gradients)
        self.activations += size.kept + size.leaving
        self._note(self.activations, self.gradients)

    def _backward(self, action: Action) -> None:
        size = self._of(action)
        self._received(action, Act.RECEIVE_GRAD)
        later = action.stage in self.summed
        activations, gradients = size.later_backward if later else size.first_backward
        others = self.gradients - (sum(size.trained.values()) if later else 0)
        self._note(self.activations - size.kept + activations, others + gradients)
        if not later:
            self.summed.add(action.stage)
            self.gradients += sum(size.trained.values())
        self.activations -= size.leaving + (0 if self.splits else size.kept)
