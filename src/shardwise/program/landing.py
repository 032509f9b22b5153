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

from shardwise.program.ops import Compute, Op, Regrid

# They can write to any place.
_MAKERS = ("relu", "cat")
# Their kernels read tensors with gaps without a copy, and backward reads nothing of them.
_INDIFFERENT = ("add",)


def landed(ops: Sequence[Op], departures: Collection[str]) -> tuple[Op, ...]:
    """Return the operations of a stage, with a word at each regrid whose source can be made in its result.

    Args:
        ops: in order.
        departures: slots that are wanted outside of the stage.
    """
    makers = {op.makes.slot for op in ops if isinstance(op, Compute) and _writes_anywhere(op)}
    taken = set(departures)
    regrids: dict[str, int] = {}
    for i, op in enumerate(ops):
        if isinstance(op, Regrid):
            if regrids.setdefault(op.source.slot, i) != i:
                taken.add(op.source.slot)
        elif not isinstance(op, Compute) or op.layer.op not in _INDIFFERENT:
            taken.update(held.slot for held in op.reads)
    lands = {i for slot, i in regrids.items() if slot in makers and slot not in taken}
    return tuple(
        replace(op, landing=True) if isinstance(op, Regrid) and i in lands else op for i, op in enumerate(ops)
    )


def _writes_anywhere(op: Compute) -> bool:
    made = op.makes.spec
    return op.layer.op in _MAKERS and made.is_float and all(r.spec.dtype == made.dtype for r in op.reads)
