"""Regrid: move a tensor from one layout to another, in two halves so that callers can compute in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.geometry import Box, Layout, Message
from shardwise.runtime.order import FIRST, Order
from shardwise.runtime.wire import Line, Parcel, Wire, empty

Slices = tuple[slice, ...]
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a local tensor and the part of a packed buffer that belongs to it."""

    slices: Slices
    view: Tensor
    adds: bool = False


class Scratch:
    """Memory that exchanges use in turn: each is finished before the next one starts."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    @staticmethod
    def needs(messages: Iterable[Message], itemsize: int) -> int:
        """Return the bytes of an exchange that sends and receives these messages."""
        return sum(-(-m.box.size * itemsize // _ALIGNED) * _ALIGNED for m in messages if m.source != m.target)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all."""
        return self._bytes.nbytes

    def rewind(self) -> None:
        """Begin with the buffers of another exchange."""
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return room for so many elements."""
        start, end = self._used, self._used + count * dtype.itemsize
        self._used = -(-end // _ALIGNED) * _ALIGNED
        return self._bytes[start:end].view(dtype)


class Exchange:
    """One rank's part of a message list: pack and send what others need, unpack and add what arrives.

    Buffers and message lists are made once; `start` and `finish` do no geometry. A second `start` before
    `finish` is an error, because the buffers are in use.
    """

    def __init__(
        self,
        rank: int,
        messages: Iterable[Message],
        held: Box,
        wanted: Box,
        wire: Wire,
        dtype: torch.dtype,
        device: torch.device,
        tag: int = 0,
        what: str = "regrid",
        in_place: bool = False,
        scratch: Scratch | None = None,
        order: Order = FIRST,
    ) -> None:
        """Prepare the buffers.

        Args:
            rank: who we are among the ranks of the messages.
            messages: the whole list.
            held: what the given tensor covers; it may reach beyond the image, into zeros.
            wanted: what the result covers.
            wire: how the ranks reach each other.
            dtype: of the tensor.
            device: of the tensor.
            tag: apart from those of other exchanges on the wire.
            what: for messages to the user.
            in_place: whether the given tensor may be changed and kept, instead of a copy of it.
            scratch: where the buffers are; default: in memory of their own.
            order: how images lie in memory, in tensors and in messages.
        """
        self.scratch, self.order = scratch, order
        if scratch is not None:
            scratch.rewind()
        self.what, self.shape, self.dtype, self.device = what, wanted.shape, dtype, device
        self.held_shape = held.shape
        mine = [m for m in messages if rank in (m.source, m.target)]
        arriving = [m for m in mine if m.target == rank and m.source != rank]
        leaving = [m for m in mine if m.source == rank and m.target != rank]
        # What stays comes first, then arrivals in the order of the list: sums are the same every time.
        covered = _Covered(wanted)
        self.keep = [
            (m.box.slices(held), m.box.slices(wanted), covered.adds(m.box))
            for m in mine
            if m.source == rank and m.target == rank
        ]
        receives, self.unpack = self._parcels(arriving, wanted, covered, lambda m: m.source)
        sends, self.pack = self._parcels(leaving, held, None, lambda m: m.target)
        self.zero, self.strips = covered.zeros()
        stays = len(self.keep) == 1 and covered.boxes[1] == wanted and held.contains(wanted)
        self.reuse = self.keep[0][0] if in_place and stays else None
        self.line: Line | None = wire.line(receives, sends, tag, what) if receives or sends else None
        own = (*receives, *sends) if scratch is None else ()
        self.nbytes = sum(p.buffer.nbytes for p in own)
        self.source: Tensor | None = None
        self.room: Tensor | None = None

    def _parcels(
        self,
        messages: Sequence[Message],
        local: Box,
        covered: _Covered | None,
        peer: Callable[[Message], int],
    ) -> tuple[list[Parcel], list[_Piece]]:
        """Lay the messages to or from each peer out in one buffer."""
        by_peer: dict[int, list[Message]] = {}
        for message in messages:
            by_peer.setdefault(peer(message), []).append(message)
        parcels, pieces = [], []
        packed: dict[tuple[Box, ...], Tensor] = {}
        for other, group in by_peer.items():
            boxes = tuple(m.box for m in group)
            if covered is None and boxes in packed:
                # Several ranks need the very same: packed once, sent to each.
                parcels.append(Parcel(other, packed[boxes]))
                continue
            buffer = packed[boxes] = self._buffer(sum(box.size for box in boxes))
            parcels.append(Parcel(other, buffer))
            offset = 0
            for m in group:
                view = self.order.shaped(buffer[offset : offset + m.box.size], m.box.shape)
                offset += m.box.size
                adds = covered is not None and covered.adds(m.box)
                pieces.append(_Piece(m.box.slices(local), view, adds))
        return parcels, pieces

    def _buffer(self, count: int) -> Tensor:
        if self.scratch is None:
            return empty((count,), self.dtype, self.device)
        return self.scratch.take(count, self.dtype)

    def start(self, tensor: Tensor | None) -> None:
        """Post the receives, pack and post the sends; `tensor` is what this rank holds (None: zeros)."""
        if self.source is not None:
            raise RuntimeError(f"{self.what}: started again before it was finished")
        if tensor is None:
            # The others wait for its part all the same, and the buffers hold what was sent last.
            tensor = self.order.zeros(self.held_shape, self.dtype, self.device)
        for piece in self.pack:
            piece.view.copy_(tensor[piece.slices])
        self.source = tensor
        if self.line is not None:
            self.line.start()

    def reserve(self) -> Tensor:
        """Make the result early; return the place in it for what this rank holds, if it keeps all of that.

        What is written there before the start need not be copied.
        """
        self.room = self._make()
        return self.room[self.keep[0][1]].data

    def finish(self) -> Tensor:
        """Return the tensor in its new layout."""
        if self.room is not None:
            result, self.room = self.room, None
        elif self.reuse is not None and self.source is not None:
            # All of the result lies in what this rank holds: add to it where it is.
            result = self.source[self.reuse]
        else:
            result = self._keep()
        if self.line is not None:
            self.line.finish()
        for piece in self.unpack:
            target = result[piece.slices]
            target.add_(piece.view) if piece.adds else target.copy_(piece.view)
        self.source = None
        return result

    def _make(self) -> Tensor:
        """Make the result, with zeros where nothing will be written."""
        make = self.order.zeros if self.zero else self.order.empty
        result = make(self.shape, self.dtype, self.device)
        for strip in self.strips:
            result[strip].zero_()
        return result

    def _keep(self) -> Tensor:
        """Make the result and copy into it what this rank has of it."""
        result = self._make()
        if self.source is not None:
            for here, there, adds in self.keep:
                target = result[there]
                target.add_(self.source[here]) if adds else target.copy_(self.source[here])
        return result

    def __call__(self, tensor: Tensor | None) -> Tensor:
        """Do both halves at once."""
        self.start(tensor)
        return self.finish()


class AllReduce:
    """The regular regrid from partial sums of everything to whole copies, as one collective."""

    def __init__(
        self,
        wire: Wire,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        order: Order = FIRST,
    ) -> None:
        self.wire, self.nbytes, self.order = wire, 0, order
        self.shape, self.dtype, self.device = tuple(shape), dtype, device

    def __call__(self, tensor: Tensor | None) -> Tensor:
        """Return the sum over the group."""
        row = torch.empty(math.prod(self.shape), dtype=self.dtype, device=self.device)
        result = self.order.shaped(row, self.shape)
        result.zero_() if tensor is None else result.copy_(tensor)
        self.wire.all_reduce(row)
        return result


def bind_regrid(
    src: Layout,
    dst: Layout,
    messages: Sequence[Message],
    rank: int,
    wire: Wire,
    dtype: torch.dtype,
    device: torch.device,
    tag: int = 0,
    what: str = "regrid",
    stored: Box | None = None,
    owns_gradient: bool = True,
    scratch: Scratch | None = None,
    order: Order = FIRST,
) -> tuple[Exchange | AllReduce, Exchange | AllReduce]:
    """Return this rank's part of a regrid and of its adjoint.

    `stored` is what the result covers if that is more than this rank's box in `dst`: zeros around it. An
    adjoint that `owns_gradient` may change and keep the gradient it is given instead of copying it. With
    `scratch` both halves use its memory, and nothing else may while one of them is under way. Images are in
    `order` on both sides.
    """
    if src.ranks == dst.ranks and src.partial and dst.is_whole and src.as_partial(False).is_whole:
        both = AllReduce(wire, src.shape, dtype, device, order)
        return both, both
    held, wanted = src.box(rank), dst.box(rank) if stored is None else stored
    back = [Message(m.target, m.source, m.box) for m in messages]
    forward = Exchange(rank, messages, held, wanted, wire, dtype, device, tag, what, False, scratch, order)
    what_back = f"{what} (backward)"
    adjoint = Exchange(
        rank, back, wanted, held, wire, dtype, device, tag, what_back, owns_gradient, scratch, order
    )
    return forward, adjoint


class _Covered:
    """Keep track of which elements of a target were written, to know which arrivals add."""

    def __init__(self, wanted: Box) -> None:
        self.wanted, self.boxes, self.mixed = wanted, [Box(wanted.lo, wanted.lo)], False

    def adds(self, box: Box) -> bool:
        """Note that `box` arrives; tell whether it meets an earlier one and must be added to it."""
        meets = any(not box.intersect(other).empty for other in self.boxes)
        self.mixed |= meets and bool(self._left(box))
        self.boxes.append(box)
        return meets

    def zeros(self) -> tuple[bool, list[Slices]]:
        """Tell whether all must start at zero, else which parts: those that nothing is written to."""
        left = self._left(self.wanted)
        if self.mixed or len(left) > 8:
            return True, []
        return False, [box.slices(self.wanted) for box in left]

    def _left(self, box: Box) -> list[Box]:
        rest = [box]
        for other in self.boxes:
            rest = [piece for part in rest for piece in part.minus(other)]
        return [part for part in rest if not part.empty]
