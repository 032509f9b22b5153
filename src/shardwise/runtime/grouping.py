"""Group the operations of a stage: computations between two communications belong together.

Everything here is found from the operations alone, never from one rank's boxes: all ranks of a group have
to start their communications in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwise.program import Compute, Held, Normalise, Op, Regrid, StageProgram

Group = list[Compute] | Regrid | Normalise

_HEAVY = ("conv", "linear")


def grouped(ops: Sequence[Op]) -> list[Group]:
    """Return the communications, and the lists of computations between them."""
    groups: list[Group] = []
    for op in ops:
        if not isinstance(op, Compute):
            groups.append(op)
        elif groups and isinstance(groups[-1], list):
            groups[-1].append(op)
        else:
            groups.append([op])
    return groups


def is_stored(op: Compute, held: Held) -> bool:
    """Tell whether an operand is a parameter or a buffer."""
    return held.value in op.layer.parameters or held.value in op.layer.buffers


def reads_of(group: Group) -> set[str]:
    """Return the slots of the values that a group reads."""
    if isinstance(group, Regrid):
        return {group.source.slot}
    if isinstance(group, Normalise):
        return {group.reads[0].slot}
    return {held.slot for op in group for held in op.reads if not is_stored(op, held)}


def read_behind(groups: Sequence[Group], program: StageProgram) -> list[set[str]]:
    """Return for each group of a stage the slots that are read behind it, by later groups or other stages."""
    later = {held.slot for held in program.departures.values()}
    result: list[set[str]] = []
    for group in reversed(groups):
        result.append(set(later))
        later |= reads_of(group)
    return result[::-1]


def parameters_of(group: Group) -> list[str]:
    """Return the parameters that a group reads, each once."""
    ops = group if isinstance(group, list) else [group] if isinstance(group, Normalise) else []
    return list(dict.fromkeys(name for op in ops for name in op.layer.parameters))


def last_uses(groups: Sequence[Group]) -> list[list[str]]:
    """Return for each group the parameters that no earlier group reads: backward ends with them there."""
    seen: set[str] = set()
    result = []
    for group in groups:
        fresh = [name for name in parameters_of(group) if name not in seen]
        seen.update(fresh)
        result.append(fresh)
    return result


def put_off(groups: Sequence[Group]) -> list[Compute | None]:
    """Return for each group the computation whose weight gradient can wait for the next message back.

        ... <- exchange or norm <- [ convolution <- others ] <- ...        backward, right to left

    It is the last heavy one on the way back, if a communication that passes a gradient on follows it: that
    one is started first, and the weight gradient is computed while it travels.
    """
    uses = Counter(name for g in groups if isinstance(g, list) for op in g for name in op.layer.parameters)
    result: list[Compute | None] = []
    before: Group | None = None
    for group in groups:
        found = None
        if isinstance(group, list) and before is not None and _passes_gradient(before):
            heavy = [op for op in group if op.layer.op in _HEAVY]
            if heavy and any(uses[name] for name in heavy[0].layer.parameters):
                found = heavy[0] if all(uses[n] == 1 for n in heavy[0].layer.parameters) else None
        result.append(found)
        before = group
    return result


def _passes_gradient(group: Group) -> bool:
    if isinstance(group, Regrid):
        return group.makes.grad
    return isinstance(group, Normalise)
