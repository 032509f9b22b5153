"""The steps of a stage that communicate: regrids, and normalisations whose statistics ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.program import Normalise, Regrid
from shardwise.runtime.flow import Flow, Slots, add_gradient, shared
from shardwise.runtime.interior import Interior
from shardwise.runtime.order import FIRST, Order
from shardwise.runtime.regrid import Exchange, Scratch, bind_regrid
from shardwise.runtime.shared_norm import bind_norm
from shardwise.runtime.wire import Wire, Wires


class Exchanged:
    """A regrid forwards, its adjoint backwards."""

    communicates = True

    def __init__(
        self,
        op: Regrid,
        rank: int,
        wire: Wire,
        device: torch.device,
        tag: int,
        interior: Interior | None = None,
        scratch: Scratch | None = None,
        order: Order = FIRST,
    ) -> None:
        dtype = getattr(torch, op.makes.spec.dtype)
        self.source, self.makes, self.grad = op.source.slot, op.makes.slot, op.makes.grad
        self.there, self.back = bind_regrid(
            op.source.layout,
            op.makes.layout,
            op.messages,
            rank,
            wire,
            dtype,
            device,
            tag,
            op.why,
            op.makes.stored(rank),
            scratch=scratch,
            order=order,
        )
        held, wanted = op.source.layout.box(rank), op.makes.stored(rank)
        self.inner = held.slices(wanted) if op.widens(rank) else None
        self.interior = interior
        # A convolution of the interior reads the tile on its own, and wants it without gaps.
        self.room = self.there if op.lands(rank) and interior is None else None

    def forward(self, flow: Flow, keep: bool) -> None:
        """Bring the value into its new layout."""
        tile = flow.slots[self.source]
        if keep and self.interior is not None and isinstance(self.there, Exchange):
            self.there.start(tile)
            made = self.interior.start(tile)
            result = self.there.finish()
            flow.ahead[self.interior.slot] = self.interior.finish(result, made)
        else:
            result = self.there(tile)
        flow.slots[self.makes] = result
        if self.inner is not None:
            # The widened tensor holds all that the tile held: one copy is enough for backward.
            for box in flow.saved.pop(self.source, ()):
                box.tensor = result[self.inner]

    def begin(self, saved: None, grads: Slots) -> Tensor | None:
        """Send the gradients of what came from others."""
        if not self.grad:
            return None
        gradient = grads.pop(self.makes, None)
        if isinstance(self.back, Exchange):
            self.back.start(gradient)
            return None
        return self.back(gradient)

    def end(self, under_way: Tensor | None, grads: Slots) -> None:
        """Add those that arrive."""
        if self.grad:
            arrived = self.back.finish() if isinstance(self.back, Exchange) else under_way
            if arrived is not None:
                add_gradient(grads, self.source, arrived)


class Normalised:
    """A normalisation that communicates."""

    communicates = True

    def __init__(
        self,
        op: Normalise,
        rank: int,
        wires: Wires,
        tensors: Mapping[str, Tensor],
        order: Order = FIRST,
        room: Exchange | None = None,
    ) -> None:
        self.norm, self.order = bind_norm(op, rank, wires, tensors, room), order
        self.source, self.makes, self.grad = op.reads[0].slot, op.makes.slot, op.reads[0].grad
        self.crop = self.norm.crop
        self.shape = op.reads[0].layout.box(rank).shape

    def forward(self, flow: Flow, keep: bool) -> Any:
        """Normalise with the statistics of all."""
        with torch.no_grad():
            flow.slots[self.makes], saved = self.norm.forward(flow.slots[self.source])
        return saved if keep else None

    def begin(self, saved: Any, grads: Slots) -> Any:
        """Start to add up what the gradients of all ranks say about the statistics."""
        dy = grads.pop(self.makes, None)
        with torch.no_grad():
            if dy is None:
                return self.norm.begin(saved, torch.zeros_like(saved.x))
            return self.norm.begin(saved, dy, not shared(grads, dy))

    def end(self, under_way: Any, grads: Slots) -> None:
        """Compute the gradient of the input."""
        with torch.no_grad():
            dx = self.norm.end(under_way)
        if not self.grad:
            return
        if self.crop is not None:
            wide = self.order.zeros(self.shape, dx.dtype, dx.device)
            wide[self.crop] = dx
            dx = wide
        add_gradient(grads, self.source, dx)
