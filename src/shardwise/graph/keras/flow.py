"""A tensor of a Keras model on its way through the trace, and what rules do with it.

Convolutions, poolings and batch norm of torch want the channels in dimension 1, Keras usually has them last.
A tensor is `moved` where its last dimension has been brought there. Rules ask for the order that they need;
a permutation is added where it is not so, each only once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import torch
from torch import Tensor

from shardwise.graph.keras.module import KerasModule
from shardwise.graph.trace import Result, Step, Weight


@dataclass(frozen=True, eq=False, slots=True)
class Flow:
    """A tensor of the model: who makes it, Keras's shape and dtype, whether it is moved, its mask."""

    ref: Result
    shape: tuple[int | None, ...] = ()
    dtype: str = "float32"
    moved: bool = False
    mask: Flow | None = None

    @property
    def rank(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def dim(self, axis: int) -> int:
        """Return where Keras's dimension `axis` is now."""
        axis %= self.rank
        if not self.moved or axis == 0:
            return axis
        return 1 if axis == self.rank - 1 else axis + 1

    def made(self, ref: Result, moved: bool | None = None) -> Flow:
        """Return the result of a step on this tensor; the walk corrects its shape, and adds its mask."""
        return replace(self, ref=ref, moved=self.moved if moved is None else moved, mask=None)


def flows_in(tree: Any) -> list[Flow]:
    """Return the flows in a tree of arguments, in Keras's order."""
    return [item for item in keras.tree.flatten(tree) if isinstance(item, Flow)]


class Scribe:
    """Write the steps of a trace for the rules."""

    def __init__(self, module: KerasModule) -> None:
        self.module = module
        self.training = module.training
        self.steps: list[Step] = []
        self.constants: dict[str, Tensor] = {}
        self.label = ""
        self._orders: dict[tuple[str, bool], Flow] = {}

    def add(
        self,
        target: Any,
        *args: Any,
        part: str = "",
        reason: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> Result:
        """Add a call; `part` tells it from other calls of the same layer."""
        label = f"{self.label}.{part}" if part else self.label
        step = Step(
            id=f"%{len(self.steps)}",
            target=target,
            args=args,
            kwargs=dict(options or {}),
            label=label,
            module="" if part else self.label,
            where=f"Keras layer {self.label!r}",
            reason=reason,
        )
        self.steps.append(step)
        return Result(step.id)

    def mark(self) -> tuple[int, dict[tuple[str, bool], Flow], dict[str, Tensor]]:
        """Return what `undo` needs to forget what is written from now on."""
        return len(self.steps), dict(self._orders), dict(self.constants)

    def undo(self, mark: tuple[int, dict[tuple[str, bool], Flow], dict[str, Tensor]]) -> None:
        """Forget what was written since a mark."""
        count, self._orders, self.constants = mark
        del self.steps[count:]

    @contextlib.contextmanager
    def told(self, training: bool | None) -> Iterator[None]:
        """Let a layer, and those inside of it, behave as its caller says, if it says anything."""
        before = self.training
        self.training = before if training is None else bool(training)
        try:
            yield
        finally:
            self.training = before

    def weight(self, variable: Any) -> Weight | None:
        """Refer to a Keras variable."""
        return None if variable is None else Weight(self.module.names[id(variable)])

    def constant(self, tensor: Tensor) -> Weight:
        """Refer to a tensor that no Keras variable holds."""
        name = f"{self.label}/constant{len(self.constants)}"
        self.constants[name] = tensor
        return Weight(name)

    def order(self, flow: Flow, moved: bool) -> Flow:
        """Return a tensor with its channels moved, or as Keras has it."""
        if flow.moved == moved or flow.rank < 3:
            return flow
        key = (flow.ref.id, moved)
        if key not in self._orders:
            last = flow.rank - 1
            dims = (0, last, *range(1, last)) if moved else (0, *range(2, flow.rank), 1)
            part = "channels_first" if moved else "channels_last"
            made = self.add(torch.permute, flow.ref, dims, part=part)
            # A view: the network then computes in the memory order of its input. For channels last that is
            # the faster one where images are small and channels are few.
            self._orders[key] = flow.made(made, moved)
        return self._orders[key]

    def channels_first(self, flow: Flow, data_format: str) -> Flow:
        """Return a tensor with its channels in dimension 1, given where Keras has them."""
        return self.order(flow, moved=data_format == "channels_last")
