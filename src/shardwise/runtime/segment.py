"""Computations without communication, differentiated by local autograd."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from shardwise.graph import Kind
from shardwise.program import Compute
from shardwise.runtime.flow import Flow, SavedBox, Slots, add_gradient, place_of
from shardwise.runtime.grouping import is_stored
from shardwise.runtime.hollow import hollow
from shardwise.runtime.in_place import rectified_in_place, rectify
from shardwise.runtime.landing import bind_landing
from shardwise.runtime.regrid import Exchange
from shardwise.runtime.rules import Surroundings, bind
from shardwise.runtime.weights_later import Note, WeightsLater

# Their first operand has a gradient for sure if their result has one.
_SURE = ("conv", "linear", "max_pool")


class Segment:
    """Run some computations in a row.

    Between the passes it keeps the graph but neither its inputs nor its outputs: an input enters through a
    view of a leaf whose own storage is dropped at once, an output is remembered by its edge in the graph.
    """

    communicates = False

    def __init__(
        self,
        ops: Sequence[Compute],
        rank: int,
        tensors: Mapping[str, Tensor],
        outside: set[str],
        moved: set[str],
        surroundings: Surroundings,
        later: Compute | None = None,
        rooms: Mapping[str, Exchange] | None = None,
        changed: Collection[str] = (),
    ) -> None:
        """Bind the computations.

        Args:
            ops: in order.
            rank: who we are in the group.
            tensors: parameters and buffers by name.
            outside: slots that are read behind this segment.
            moved: slots that a regrid copies.
            surroundings: for rules that want to know more.
            later: the computation whose weight gradient is left to the second half of backward.
            rooms: the exchanges in whose results slots are made.
            changed: slots whose makers overwrite the gradients they are given.
        """
        made = {op.makes.slot for op in ops}
        self.surroundings = surroundings
        self.calls = []
        self.reads: dict[str, bool] = {}
        rooms = rooms or {}
        overwrites = rectified_in_place(ops, rank, outside, rooms)
        for i, op in enumerate(ops):
            names = []
            for held in op.reads:
                names.append((held.slot, tensors.get(held.slot) if is_stored(op, held) else None))
                if not is_stored(op, held) and held.slot not in made:
                    self.reads[held.slot] = held.grad
            if op.makes.slot in rooms:
                run = bind_landing(op, rank, rooms[op.makes.slot].reserve)
            else:
                run = rectify if i in overwrites else bind(op, rank, surroundings)
            self.calls.append((run, names, op.makes.slot, op is later))
        self.makes = [op.makes.slot for op in ops if op.makes.slot in outside]
        self.frees = _last_reads(
            [[n for n, t in names if t is None] for _, names, _, _ in self.calls], self.makes
        )
        self.moved = [slot for slot in self.makes if slot in moved and slot not in rooms]
        # What another output is made of: autograd comes by there in any case.
        self.passed: dict[str, list[str]] = {}
        for op in ops:
            known = op.layer.op in _SURE and op.layer.kind is not Kind.OTHER
            if known and op.makes.slot in self.makes and op.reads[0].slot in self.makes:
                self.passed.setdefault(op.reads[0].slot, []).append(op.makes.slot)
        self.read_inside = {name for _, names, _, _ in self.calls for name, _ in names}
        self.changed = changed

    def forward(self, flow: Flow, keep: bool) -> Any:
        """Compute; return the leaves, the edges of the outputs and the weights' parts put off."""
        slots = flow.slots
        notes: list[Note] = []
        if not keep:
            local = {slot: slots[slot] for slot in self.reads}
            with torch.no_grad():
                self._run(local, None, {})
            slots.update((slot, local[slot]) for slot in self.makes)
            return None
        local, leaves = self._enter(slots)
        with torch.enable_grad():
            if self.moved:
                packed: list[SavedBox] = []
                with torch.autograd.graph.saved_tensors_hooks(_packer(packed), _unpack):
                    self._run(local, notes, flow.ahead)
                self._note(local, packed, flow)
            else:
                self._run(local, notes, flow.ahead)
        edges = []
        for slot in self.makes:
            out = local[slot]
            edges.append(torch.autograd.graph.get_gradient_edge(out) if out.requires_grad else None)
            slots[slot] = out.detach()
        return leaves, edges, notes, flow.later

    def _enter(self, slots: Slots) -> tuple[Slots, Slots]:
        local: Slots = {}
        leaves: Slots = {}
        for slot, grad in self.reads.items():
            tensor = slots[slot]
            if grad:
                leaf = leaves[slot] = tensor.detach().requires_grad_()
                with torch.enable_grad():
                    # Unlike `view_as`, this keeps the strides of a single image.
                    local[slot] = torch.ops.aten.alias(leaf)
                leaf.data = hollow(tensor)
            else:
                local[slot] = tensor
        return local, leaves

    def _run(self, local: Slots, notes: list[Note] | None, ahead: Slots) -> None:
        between = self.surroundings.between
        for (run, names, makes, later), frees in zip(self.calls, self.frees, strict=True):
            made = ahead.pop(makes, None)
            with WeightsLater(notes, made) if later and notes is not None else nullcontext():
                local[makes] = run([t if t is not None else local[name] for name, t in names])
            # What autograd did not save is free for the next layer, as in a plain forward pass.
            for name in frees:
                del local[name]
            if between is not None:
                between()

    def _note(self, local: Slots, packed: Sequence[SavedBox], flow: Flow) -> None:
        """Find what autograd saved of the outputs that a regrid is about to copy."""
        for slot in self.moved:
            out = local[slot]
            place = (out.data_ptr(), out.shape)
            flow.saved[slot] = [box for box in packed if (box.tensor.data_ptr(), box.tensor.shape) == place]

    def begin(self, saved: Any, grads: Slots) -> list[Note]:
        """Differentiate; return the weights' parts that are left."""
        leaves, edges, notes, later = saved
        open_edges = {
            slot: edge
            for slot, edge in zip(self.makes, edges, strict=True)
            if slot in grads and edge is not None
        }
        # Gradients in memory that no other one has may be overwritten.
        count = Counter(map(place_of, grads.values()))
        held: dict[str, list[Tensor]] = {}
        pairs = []
        for slot, edge in open_edges.items():
            own = count[place_of(grads[slot])] == 1
            if any(reader in open_edges for reader in self.passed.get(slot, ())):
                held[slot] = [grads.pop(slot)]
                hand_over(edge, held[slot], own)
            else:
                pairs.append((edge, self._handed(edge, slot, grads, own)))
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        if any(held.values()):
            raise RuntimeError(f"autograd did not come by {[slot for slot, left in held.items() if left]}")
        # A sum hands one gradient to both of its operands. What is put off with its weights, to the second
        # half or to a time of its own, and what exchanges will add to, must have memory of its own.
        put_off = {place_of(note.gradient) for note in (*notes, *later)}
        for slot, gradient in grads.items():
            if place_of(gradient) in put_off:
                grads[slot] = gradient.clone()
        alone = dict.fromkeys(put_off, True)
        for slot, gradient in grads.items():
            alone[place_of(gradient)] = alone.get(place_of(gradient), False) or slot in self.changed
        for slot, leaf in leaves.items():
            if leaf.grad is None:
                continue
            place, changes = place_of(leaf.grad), slot in self.changed
            if place in alone and (changes or alone[place]):
                add_gradient(grads, slot, leaf.grad.clone())
            else:
                alone[place] = changes
                add_gradient(grads, slot, leaf.grad)
        return list(notes)

    def _handed(self, edge: GradientEdge, slot: str, grads: Slots, own: bool) -> Tensor:
        """Return the gradient of an output, or a stand-in that becomes it when its turn comes.

        Autograd holds what it is called with until it returns. What it is handed on the way it lets go of
        once that was read, and the next computation writes to memory that the caches still know.
        """
        gradient = grads.pop(slot)
        return gradient if slot in self.read_inside else stand_in(edge, [gradient], own)

    def end(self, under_way: list[Note], grads: Slots) -> None:
        """Add the gradients of the weights that were put off."""
        for note in under_way:
            note()


def stand_in(edge: GradientEdge, holder: list[Tensor], own: bool = True) -> Tensor:
    """Return zeros that are replaced by what the holder has when autograd comes to the edge."""
    zeros = holder[0].new_zeros(()).expand(holder[0].shape)
    hand_over(edge, holder, own, zeros.data_ptr())
    return zeros


def hand_over(edge: GradientEdge, holder: list[Tensor], own: bool, zeros: int = 0) -> None:
    """Let autograd add what the holder has to what it brings to the edge: nothing, zeros, or gradients.

    Those of other names or readers of the same tensor come with it, or were added to the zeros at `zeros`.
    What is held is overwritten by the sum if it is the holder's `own`.
    """
    number = edge.output_nr

    def add(found: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        others, total = found[number], holder.pop()
        if others is not None and others.data_ptr() != zeros:
            total = total.add_(others) if own else total + others
        return (*found[:number], total, *found[number + 1 :])

    edge.node.register_prehook(add)


def _last_reads(reads: Sequence[Sequence[str]], kept: Sequence[str]) -> list[list[str]]:
    """Return for each call the slots that no later one reads and nobody wants outside."""
    seen = set(kept)
    result = []
    for names in reversed(reads):
        fresh = [name for name in dict.fromkeys(names) if name not in seen]
        seen.update(fresh)
        result.append(fresh)
    return result[::-1]


def _packer(packed: list[SavedBox]) -> Callable[[Tensor], SavedBox]:
    def pack(tensor: Tensor) -> SavedBox:
        box = SavedBox(tensor)
        packed.append(box)
        return box

    return pack


def _unpack(box: SavedBox) -> Tensor:
    return box.tensor
