"""What a rank copies and adds around communications: no kernel of a layer, but time and memory traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.geometry import Box
from shardwise.program import Op, Regrid

REGRID, SUM, UPDATE, REDUCE = "regrid", "sum", "update", "reduce"
# Of smaller parameters updates are mostly software, which is calibrated.
SMALLEST_UPDATE = 256 << 10


@dataclass(frozen=True)
class Move:
    """Copies or additions of one rank.

    Args:
        kind: `regrid` (packing, unpacking, copying what stays), `sum` (adding one tensor to another),
            `update` (of a parameter by the optimizer) or `reduce` (adding up gradients of several ranks).
        nbytes: what is read and written; of an update the parameter's own, of gradients one rank's.
        touches: words, and boxes or shapes of what is touched.
        shape, dtype: of a sum.
    """

    kind: str
    nbytes: float
    touches: tuple[str | tuple[Box | tuple[int, ...], ...], ...]
    shape: tuple[int, ...] = ()
    dtype: str = ""

    @cached_property
    def key(self) -> str:
        """Return a text that is equal for moves that touch the same shapes in the same way."""
        words = (what if isinstance(what, str) else ",".join(map(_text, what)) for what in self.touches)
        return f"{self.kind} {' '.join(words)}"


def move_of(op: Regrid, rank: int, *, back: bool = False) -> Move:
    """Return what a rank copies in a regrid, or in its adjoint; messages themselves are not in it."""
    itemsize, dtype = op.makes.spec.itemsize, op.makes.spec.dtype
    if op.is_sum:
        shape = op.makes.layout.box(rank).shape
        return Move(REGRID, 2 * op.makes.spec.nbytes, (dtype, "all", (shape,)))
    held, wanted = op.source.layout.box(rank), op.makes.stored(rank)
    there, here = (held, wanted) if back else (wanted, held)
    parts: dict[str, list[Box]] = {"stay": [], "out": [], "in": []}
    for m in op.messages_of(rank):
        name = "stay" if m.source == m.target else "out" if (m.source == rank) != back else "in"
        parts[name].append(m.box)
    first = f"back {dtype}" if back else dtype
    written = there.size
    if op.lands(rank) and not back:
        # What stays was made where it stays.
        written -= held.size
        first, parts["stay"] = f"landing {dtype}", []
    touched = [what for name, boxes in parts.items() for what in (name, tuple(boxes))]
    travelling = sum(b.size for name in ("out", "in") for b in parts[name])
    nbytes = 2 * (written + travelling) * itemsize
    return Move(REGRID, nbytes, (first, (here,), (there,), *touched))


def sum_of(shape: Sequence[int], dtype: str, itemsize: int) -> Move:
    """Return the addition of one tensor to another of the same shape."""
    count = 1
    for extent in shape:
        count *= extent
    return Move(SUM, 3 * count * itemsize, (dtype, (tuple(shape),)), tuple(shape), dtype)


def update_of(shape: Sequence[int], dtype: str, itemsize: int) -> Move | None:
    """Return the update of a parameter; None if it is too small to be told from software."""
    nbytes = itemsize * math.prod(shape)
    return Move(UPDATE, nbytes, (dtype, str(nbytes))) if nbytes >= SMALLEST_UPDATE else None


def reduction_of(transport: str, ranks: int, nbytes: int) -> Move:
    """Return the sum of gradients of so many ranks, one of many."""
    return Move(REDUCE, nbytes, (transport, str(ranks), str(nbytes)))


def joins(ops: Sequence[Op], departures: set[str]) -> list[tuple[int, ...]]:
    """Return for each operation which of its reads get a second gradient, to be added to an earlier one.

    Backward comes from the end: a value that something later reads, or that leaves, has a gradient already.
    """
    seen = set(departures)
    result: list[tuple[int, ...]] = []
    for op in reversed(ops):
        if isinstance(op, Regrid):
            again: tuple[int, ...] = (0,) if op.makes.grad and op.source.slot in seen else ()
            seen.add(op.source.slot)
        else:
            again = ()
            for i, (operand, held) in enumerate(zip(op.layer.operands, op.reads, strict=True)):
                if op.makes.grad and held.grad and operand.source not in op.layer.parameters:
                    if held.slot in seen:
                        again = (*again, i)
                    seen.add(held.slot)
        result.append(again)
    return result[::-1]


def _text(what: Box | Sequence[int]) -> str:
    return "x".join(map(str, what.shape if isinstance(what, Box) else what))
