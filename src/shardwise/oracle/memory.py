"""Peak memory of a stage on each rank: what is stored, what autograd keeps, what is alive for a moment."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.graph import Source
from shardwise.program import Compute, Held, Normalise, Op, Regrid, StageProgram

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "buffers", "baseline")


def stage_memory(
    program: StageProgram,
    rank: int,
    *,
    optimizer_slots: float = 1.0,
    in_flight: int = 1,
    baseline_bytes: float = 0.0,
) -> Mapping[str, float]:
    """Return the bytes of one rank at its fullest moment, by category.

    Args:
        program: the lowered stage.
        rank: position in the group.
        optimizer_slots: copies of the parameters that the optimizer keeps (momentum 1, Adam 2).
        in_flight: micro-batches whose activations are kept at once.
        baseline_bytes: what the process takes before the first tensor.
    """
    weights, trainable, stored = _stored(program, rank)
    kept, moment = _activations(program, rank)
    return {
        "weights": float(weights + stored),
        "gradients": float(trainable),
        "optimizer": optimizer_slots * trainable,
        "activations": float(kept * in_flight + moment),
        "buffers": float(_buffers(program, rank)),
        "baseline": float(baseline_bytes),
    }


def _stored(program: StageProgram, rank: int) -> tuple[int, int, int]:
    """Return the bytes of parameters, of trainable ones among them, and of buffers."""
    sizes: dict[str, tuple[int, Source, bool]] = {}
    for op in program.ops:
        if isinstance(op, Regrid):
            continue
        for operand, held in zip(op.layer.operands, op.reads, strict=True):
            if operand.origin is Source.VALUE:
                continue
            store = program.parameters if operand.origin is Source.PARAMETER else program.buffers
            size = store[operand.source].box(rank).size * operand.spec.itemsize
            sizes[operand.source] = (size, operand.origin, held.grad)
    weights = sum(n for n, origin, _ in sizes.values() if origin is Source.PARAMETER)
    trainable = sum(n for n, origin, grad in sizes.values() if origin is Source.PARAMETER and grad)
    return weights, trainable, sum(n for n, origin, _ in sizes.values() if origin is Source.BUFFER)


def _activations(program: StageProgram, rank: int) -> tuple[int, int]:
    """Return what forward leaves for backward, and the largest surplus at any moment of either pass."""
    ops = program.ops
    last: dict[str, int] = {h.slot: -1 for h in program.arrivals.values()}
    for i, op in enumerate(ops):
        for held in _values(op):
            last[held.slot] = i
    for held in program.departures.values():
        last[held.slot] = len(ops)
    saved: set[str] = set()
    alive = {h.slot: _bytes(h, rank) for h in program.arrivals.values()}
    kept, moment, peak = 0, sum(alive.values()), sum(alive.values())
    added: list[int] = []
    dying: dict[int, list[str]] = {}
    for slot, i in last.items():
        dying.setdefault(i, []).append(slot)
    for i, op in enumerate(ops):
        alive[op.makes.slot] = _bytes(op.makes, rank)
        moment += alive[op.makes.slot]
        amount, taken = _saves(op, rank, saved)
        # What autograd keeps is no longer counted as alive for a moment.
        moment -= sum(alive.pop(slot, 0) for slot in taken)
        kept += amount
        added.append(amount)
        peak = max(peak, kept + moment)
        moment -= sum(alive.pop(slot, 0) for slot in dying.get(i, ()))
    remaining = kept
    gradients = {h.slot: _bytes(h, rank) for h in program.departures.values()}
    flowing = sum(gradients.values())
    for op, amount in zip(reversed(ops), reversed(added), strict=True):
        for held in (op.makes, *_values(op)):
            if held.grad and held.slot not in gradients:
                gradients[held.slot] = _bytes(held, rank)
                flowing += gradients[held.slot]
        peak = max(peak, remaining + flowing)
        flowing -= gradients.pop(op.makes.slot, 0)
        remaining -= amount
    return kept, max(0, peak - kept)


def _values(op: Op) -> tuple[Held, ...]:
    """Return the activations that an operation reads."""
    if isinstance(op, Regrid):
        return (op.source,)
    pairs = zip(op.layer.operands, op.reads, strict=True)
    return tuple(held for operand, held in pairs if operand.origin is Source.VALUE)


def _bytes(held: Held, rank: int) -> int:
    return held.layout.box(rank).size * held.spec.itemsize


def _saves(op: Op, rank: int, saved: set[str]) -> tuple[int, list[str]]:
    """Return the bytes that an operation newly keeps for backward, and the slots among them."""
    if isinstance(op, Regrid) or not op.makes.grad:
        return 0, []
    values = (*_values(op), op.makes)
    names = {op.reads[0].value} if isinstance(op, Normalise) else set(op.layer.saves)
    fresh = {h.slot: _bytes(h, rank) for h in values if h.value in names and h.slot not in saved}
    saved.update(fresh)
    amount = sum(fresh.values())
    if isinstance(op, Compute):
        specs = {o.source: o.spec for o in op.layer.operands} | {op.layer.name: op.makes.spec}
        named = sum(specs[name].nbytes for name in names if name in specs)
        # What has no name of its own (indices of a pooling, masks) is cut as the output is.
        unnamed = max(0, op.layer.saved_bytes - named)
        amount += unnamed * op.makes.layout.box(rank).size // max(1, op.makes.spec.numel)
    return amount, list(fresh)


def _buffers(program: StageProgram, rank: int) -> int:
    """Return the bytes of the packed parcels of all exchanges, which stay allocated in both directions."""
    total = 0
    for op in program.ops:
        if isinstance(op, Regrid):
            itemsize = op.makes.spec.itemsize
            travels = [m for m in op.messages if m.source != m.target and rank in (m.source, m.target)]
            total += 2 * sum(m.box.size for m in travels) * itemsize
    return total
