"""What a rank copies and adds around communications: no kernel of a layer, but time and memory traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.geometry import Box
from shardwise.program import Op, Regrid

REGRID, SUM = "regrid", "sum"


@dataclass(frozen=True, slots=True)
class Move:
    """Copies or additions of one rank; `key` is equal for those that touch the same shapes.

    Args:
        kind: `regrid` (packing, unpacking, copying what stays) or `sum` (adding one tensor to another).
        key: kind, dtype and shapes.
        nbytes: what is read and written.
        shape, dtype: of a sum.
    """

    kind: str
    key: str
    nbytes: float
    shape: tuple[int, ...] = ()
    dtype: str = ""


def move_of(op: Regrid, rank: int, *, back: bool = False) -> Move:
    """Return what a rank copies in a regrid, or in its adjoint; messages themselves are not in it."""
    itemsize, dtype = op.makes.spec.itemsize, op.makes.spec.dtype
    if is_sum(op):
        shape = op.makes.layout.box(rank).shape
        return Move(REGRID, f"regrid {dtype} all {_text(shape)}", 2 * op.makes.spec.nbytes)
    held, wanted = op.source.layout.box(rank), op.makes.stored(rank)
    there, here = (held, wanted) if back else (wanted, held)
    parts: dict[str, list[Box]] = {"stay": [], "out": [], "in": []}
    for m in op.messages:
        if rank in (m.source, m.target):
            name = "stay" if m.source == m.target else "out" if (m.source == rank) != back else "in"
            parts[name].append(m.box)
    text = " ".join(f"{name} {','.join(_text(b.shape) for b in boxes)}" for name, boxes in parts.items())
    word = "back " if back else ""
    travelling = sum(b.size for name in ("out", "in") for b in parts[name])
    nbytes = 2 * (there.size + travelling) * itemsize
    return Move(REGRID, f"regrid {word}{dtype} {_text(here.shape)} {_text(there.shape)} {text}", nbytes)


def is_sum(op: Regrid) -> bool:
    """Tell whether the runtime carries a regrid out as one collective on a copy."""
    src, dst = op.source.layout, op.makes.layout
    return src.ranks == dst.ranks and src.partial and dst.is_whole and src.as_partial(False).is_whole


def sum_of(shape: Sequence[int], dtype: str, itemsize: int) -> Move:
    """Return the addition of one tensor to another of the same shape."""
    count = 1
    for extent in shape:
        count *= extent
    return Move(SUM, f"sum {dtype} {_text(shape)}", 3 * count * itemsize, tuple(shape), dtype)


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


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
