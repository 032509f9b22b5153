"""What may be computed while messages travel: a choice of the user, the device or the transport."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.runtime.poller import cores
from shardwise.runtime.session import Session


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


def sums_early(session: Session) -> bool:
    """Tell whether sums of gradients start during backward, or behind it.

    Gloo adds up in threads of its own. Where every core computes they take turns with it, which made steps
    of ResNet-50 a few per cent longer; over MPI the rank itself moves the messages between computations.
    """
    busy = session.place.local_size * session.threads >= cores()
    return not (session.backend == "gloo" and session.device.type == "cpu" and busy)
