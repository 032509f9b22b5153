"""What flows through a stage: its values on the way forwards, their gradients on the way back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from shardwise.runtime.weights_later import Note

Slots = dict[str, Tensor]


@dataclass
class SavedBox:
    """A tensor that autograd saved; it may be moved to a larger buffer that holds the same values."""

    tensor: Tensor


@dataclass
class Flow:
    """The values of one forward pass.

    Args:
        slots: by name.
        saved: what autograd saved of those that will be copied elsewhere.
        ahead: outputs of computations that are yet to come, computed while messages travelled.
        later: collects the weights' parts of backward in programs that do them at times of their own.
    """

    slots: Slots
    saved: dict[str, list[SavedBox]] = field(default_factory=dict)
    ahead: Slots = field(default_factory=dict)
    later: list[Note] = field(default_factory=list)


@dataclass
class Tape:
    """What one forward pass of a stage leaves for its backward pass."""

    saved: list[Any] = field(default_factory=list)


class Step(Protocol):
    """One bound operation; its backward pass has two halves, so that others can compute in between.

    Of a computation the first half is what the step before it waits for, of a communication all that needs
    no answer from other ranks.
    """

    communicates: bool

    def forward(self, flow: Flow, keep: bool) -> Any:
        """Compute into the slots; return what backward needs."""

    def begin(self, saved: Any, grads: Slots) -> Any:
        """Start to turn gradients of what was made into gradients of what was read; return what is open."""

    def end(self, under_way: Any, grads: Slots) -> None:
        """Do what `begin` left open."""


def place_of(tensor: Tensor) -> int:
    """Return where the memory of a tensor is, to tell whether another one has the same."""
    return tensor.untyped_storage().data_ptr()


def shared(grads: Slots, gradient: Tensor) -> bool:
    """Tell whether a gradient lies in the memory of one that is still to be read."""
    place = place_of(gradient)
    return any(place_of(other) == place for other in grads.values())


def add_gradient(grads: Slots, slot: str, grad: Tensor) -> None:
    """Add a gradient, in place unless another slot has the very same one."""
    if slot not in grads:
        grads[slot] = grad
        return
    mine = grads.pop(slot)
    grads[slot] = mine + grad if shared(grads, mine) else mine.add_(grad)
