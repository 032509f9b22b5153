"""Ask for the time of every distinct computation once."""

from __future__ import annotations

from shardwise.graph import Layer
from shardwise.machine.curve import Points
from shardwise.oracle.kernels import Direction, Estimate, KernelTimes, Roofline, Task
from shardwise.oracle.moves import Move


class Memo:
    """Remember the answers of other kernel times: most ranks and micro-batches compute the same."""

    def __init__(self, kernels: KernelTimes) -> None:
        self.kernels = kernels
        self._known: dict[tuple[object, ...], Estimate] = {}
        # Layers are told apart by identity, so they must live as long as the answers.
        self._layers: dict[int, Layer] = {}

    def seconds(self, task: Task, direction: Direction) -> Estimate:
        """Return the time of one direction of a task."""
        layer = task.layer
        ways = (task.shared, task.landing, task.rectifies, direction)
        key = (id(layer), task.held, task.wants, task.out, *ways)
        found = self._known.get(key)
        if found is None:
            self._layers[id(layer)] = layer
            found = self._known[key] = self.kernels.seconds(task, direction)
        return found

    def moving(self, move: Move) -> Estimate:
        """Return the time of copies and additions around communications."""
        if isinstance(self.kernels, Roofline):
            # A division, sooner done than looked up.
            return self.kernels.moving(move)
        found = self._known.get((move.key,))
        if found is None:
            found = self._known[move.key,] = self.kernels.moving(move)
        return found

    def room(self, task: Task, direction: Direction) -> float:
        """Return the bytes that one direction allocates at its fullest moment."""
        return self.kernels.room(task, direction)

    def lateness(self) -> Points:
        """Return by which part of what they did ranks are late when they meet, over its seconds."""
        return self.kernels.lateness()

    def updates(self) -> tuple[Points, float]:
        """Return how long updates of parameters take, where that was measured with the computations."""
        return self.kernels.updates()

    def sums(self) -> dict[tuple[str, int], Points]:
        """Return how long sums of gradients take, where that was measured with the computations."""
        return self.kernels.sums()

    def fields(self) -> tuple[str, ...]:
        """Return the machine's fields that the answers so far came from."""
        return tuple(self.kernels.fields())
