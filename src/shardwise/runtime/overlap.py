"""What may be computed while messages between tiles travel: a choice of the user or of the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Overlap:
    """Say which waits are filled.

    Args:
        forward: the interior of a tile is convolved while its halo arrives.
        backward: weight gradients are computed while gradients of halos and sums of norms travel.
    """

    forward: bool = False
    backward: bool = True


NOTHING = Overlap(False, False)
_NAMED = {"off": NOTHING, "backward": Overlap(False, True), "both": Overlap(True, True)}


def overlap_of(name: str, device: torch.device) -> Overlap:
    """Return the overlap with a name; `auto` is what pays on the device.

    On a CPU a convolution in pieces, or a backward pass of it in two, costs more than the short waits it
    fills; an accelerator has idle units.
    """
    if name == "auto":
        return _NAMED["off" if device.type == "cpu" else "both"]
    if name not in _NAMED:
        raise ValueError(f"overlap: found {name!r}; expected auto, {', '.join(_NAMED)}")
    return _NAMED[name]
