"""Let a value be made where it will stay: inside the tensor that a regrid widens it to.

    +-----------------+
    |   halo          |      the regrid is left with the halo; nothing of the tile is copied
    |  +-----------+  |
    |  |   tile    |  |
    |  +-----------+  |
    +-----------------+

The tile is a view with gaps then, so all of its other readers must be indifferent to them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from shardwise.program.ops import Compute, Normalise, Op, Regrid

# They can write to any place.
_MAKERS = ("relu", "cat")
# Their kernels read tensors with gaps without a copy, and backward reads nothing of them.
_INDIFFERENT = ("add",)


def landed(ops: Sequence[Op], departures: Collection[str]) -> tuple[Op, ...]:
    """Return the operations of a stage, marking each regrid whose source can be made in its result, and the
    computation that makes it.

    Args:
        ops: in order.
        departures: slots that are wanted outside of the stage.
    """
    makers = {op.makes.slot for op in ops if not isinstance(op, Regrid) and _writes_anywhere(op)}
    taken = set(departures)
    regrids: dict[str, int] = {}
    for i, op in enumerate(ops):
        if isinstance(op, Regrid):
            if regrids.setdefault(op.source.slot, i) != i:
                taken.add(op.source.slot)
        elif not isinstance(op, Compute) or op.layer.op not in _INDIFFERENT:
            taken.update(held.slot for held in op.reads)
    lands = (regrids.keys() & makers) - taken
    return tuple(replace(op, landing=True) if _slot(op) in lands else op for op in ops)


def _slot(op: Op) -> str:
    """Return the slot that a regrid reads or a computation makes."""
    return op.source.slot if isinstance(op, Regrid) else op.makes.slot


def _writes_anywhere(op: Compute | Normalise) -> bool:
    made = op.makes.spec
    if isinstance(op, Normalise):
        return op.rectifies and op.reads[0].spec.dtype == made.dtype
    return op.layer.op in _MAKERS and made.is_float and all(r.spec.dtype == made.dtype for r in op.reads)
