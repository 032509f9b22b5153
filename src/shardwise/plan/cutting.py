"""Cut the network into stages: balanced by time under a memory limit, at given layers, or by layer counts."""

from __future__ import annotations

import difflib
import itertools
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from shardwise.graph import Graph, Kind, Layer, Source
from shardwise.plan.balance import Balance, Indices
from shardwise.plan.errors import PlanError
from shardwise.plan.parametric import even
from shardwise.plan.plan import Plan
from shardwise.plan.room import room_of
from shardwise.plan.stages import shared_parameters, stage_edges, stage_layers

FLOPS_PER_BYTE = 10.0
"""How many floating-point operations take the time of moving one byte, on CPUs and GPUs alike about ten."""
WEIGHT_PASSES = 4
"""How often weights are moved for every time that values are: each direction puts them into the order of its
kernel, their gradients are put back, and the optimizer reads and writes them."""


def cut(
    costs: Sequence[float],
    stages: int,
    *,
    memory: Sequence[float] | None = None,
    memory_limit: float | None = None,
    widths: Sequence[int] | None = None,
    boundary: Sequence[float] | None = None,
    fixed_memory: Sequence[float] | None = None,
    alive: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the first layer of each stage but the first, so that the slowest stage is as fast as possible.

    Args:
        costs: the time of each layer, in any unit.
        stages: how many stages to make; none is empty.
        memory: bytes of each layer that the ranks of a stage share, such as activations.
        memory_limit: bytes that a rank may hold.
        widths: ranks of each stage; a stage is as many times faster and holds as much less of `memory`.
        boundary: the time that a cut before layer 1, 2 ... costs both of its stages; one entry fewer than
            there are layers.
        fixed_memory: bytes of each layer that every rank of a stage holds in full, such as weights.
        alive: how many micro-batches each stage holds `memory` for at once.

    Raises:
        PlanError: if there are fewer layers than stages, or if memory admits no cut.
    """
    n = len(costs)
    wide = tuple(widths) if widths is not None else (1,) * stages
    if not 1 <= stages <= n:
        raise PlanError("stages", f"{stages} stages for {n} layers", f"write a number from 1 to {n}")
    if len(wide) != stages:
        raise ValueError(f"{stages} stages need as many widths, {len(wide)} were given")
    lowest: list[Indices] | None = None
    loads: list[list[float]] = []
    if memory_limit is not None:
        lowest = []
        shared, fixed = np.zeros(n) if memory is None else memory, fixed_memory
        for s, width in enumerate(wide):
            held = np.asarray(shared, dtype=np.float64) * (alive[s] if alive is not None else 1) / width
            if fixed is not None:
                held = held + np.asarray(fixed, dtype=np.float64)
            loads.append(held.tolist())
            sums = np.concatenate(([0.0], np.cumsum(held)))
            lowest.append(np.searchsorted(sums, sums - memory_limit * (1 + 1e-13), side="left"))
    found = Balance(costs, wide, boundary, lowest).best()
    if found is None:
        assert memory_limit is not None  # without a limit every cut is admissible
        raise _too_large(loads, memory_limit, stages)
    return found


def _too_large(loads: Sequence[Sequence[float]], limit: float, stages: int) -> PlanError:
    """Say which layer is too large for any stage, or how many stages would do."""
    each = [min(layer) for layer in zip(*loads, strict=True)]
    largest = max(range(len(each)), key=each.__getitem__)
    if each[largest] > limit:
        found = f"layer number {largest} alone needs {each[largest]:.4g} bytes of {limit:.4g} allowed"
        return PlanError("stages", found, "split its stage over more ranks")
    found = f"no cut into {stages} stages keeps every rank within {limit:.4g} bytes"
    parts, filled = 1, 0.0
    for load in (max(layer) for layer in zip(*loads, strict=True)):
        if filled + load > limit:
            parts, filled = parts + 1, 0.0
        filled += load
    return PlanError(
        "stages", found, f"write stages={max(parts, stages + 1)}, or split stages over more ranks"
    )


def choose_cuts(
    graph: Graph,
    plan: Plan,
    *,
    cost: Callable[[Layer], float] | None = None,
    memory_limit: float | None = None,
) -> tuple[int, ...]:
    """Return where the plan cuts the network: as `plan.cuts` says, else balanced by time.

    Args:
        graph: the network.
        plan: how it is split.
        cost: the time of a layer; an estimate from its operations and bytes unless given.
        memory_limit: bytes that a rank may hold, by the estimate of `room_of`; balanced cuts keep within it.

    Raises:
        PlanError: if `plan.cuts` does not fit the network, or if memory admits no cut.
    """
    stages = len(plan.stages)
    if stages == 1 and not plan.cuts:
        return ()
    places, costs, boundary = _problem(graph)
    if plan.cuts and len(plan.cuts) == stages and all(c.isdecimal() for c in plan.cuts):
        every = _places(graph)
        counted = cuts_from_counts(len(every), [int(c) for c in plan.cuts])
        return _taken_apart(graph, [every[i] for i in counted])
    if plan.cuts:
        if len(plan.cuts) != stages - 1:
            raise PlanError(
                "cuts",
                f"{len(plan.cuts)} entries for {stages} stages",
                f"give {stages - 1} names of first layers, or {stages} counts of layers",
            )
        return _taken_apart(graph, cuts_from_names(graph, plan.cuts))
    room = room_of(graph, plan, places, memory_limit) if memory_limit is not None else None
    found = cut(
        costs if cost is None else _costs(graph, places, cost),
        stages,
        memory=room.values if room else None,
        memory_limit=room.limit if room else None,
        widths=[split.width for split in plan.stages],
        boundary=None if cost else boundary,
        fixed_memory=room.weights if room else None,
        alive=room.alive if room else None,
    )
    return tuple(places[i] for i in found)


def earliest_cut(graph: Graph, width: int, singles: int, count: int = 1) -> int:
    """Return a place before which balanced cuts cannot end the wide stages, without looking for them.

    The parts behind that cut are no slower than those of any other cuts, so together they take no more than
    that many times as long; the rest of the network is before it.

    Args:
        graph: the network.
        width: ranks of each of the first stages.
        singles: stages of one rank behind them.
        count: how many wide stages there are.
    """
    places, costs, boundary = _problem(graph)
    balance = Balance(costs, ((width,) * count) + (1,) * singles, boundary)
    slowest = balance.slowest(even(balance.sums, balance.widths))
    rest = float(balance.sums[-1]) - singles * slowest
    return places[min(int(np.searchsorted(balance.sums, rest * (1 - 1e-9))), len(places) - 1)]


# Where stages may begin, costs from there to the next, and costs of boundaries of a network; plans by the
# thousand ask for the same ones.
_Problem = tuple[list[int], list[float], list[float]]
_problems: dict[int, tuple[weakref.ref[Graph], _Problem]] = {}


def _problem(graph: Graph) -> _Problem:
    key = id(graph)
    if key not in _problems or _problems[key][0]() is not graph:
        inside = _inside_results(graph)
        places, crossing = [i for i in _places(graph) if i not in inside], crossing_bytes(graph)
        boundary = [2 * FLOPS_PER_BYTE * crossing[i] for i in places[1:]]
        made = (places, _costs(graph, places, layer_cost), boundary)
        _problems[key] = (weakref.ref(graph, lambda _: _problems.pop(key, None)), made)
    return _problems[key][1]


def _costs(graph: Graph, places: Sequence[int], cost: Callable[[Layer], float]) -> list[float]:
    """Return the cost of all layers from each place to the next."""
    spans = itertools.pairwise([*places, len(graph.layers)])
    parts = ([layer for layer in graph.layers[a:b] if layer.kind is not Kind.INPUT] for a, b in spans)
    return [sum(map(cost, part)) for part in parts]


def layer_cost(layer: Layer) -> float:
    """Estimate the time of a layer, forward and backward: its operations, and the bytes it moves."""
    if layer.kind is Kind.INPUT:
        return 0.0
    moved = sum(spec.nbytes for spec in layer.outputs)
    moved += sum(
        o.spec.nbytes * (WEIGHT_PASSES if o.origin is Source.PARAMETER else 1) for o in layer.operands
    )
    return layer.forward_flops + layer.backward_flops + 3 * FLOPS_PER_BYTE * moved


def cuts_from_names(graph: Graph, names: Sequence[str]) -> tuple[int, ...]:
    """Return the positions of the named layers; the name of a module means its first layer."""
    positions = [_find(graph, name) for name in names]
    firsts = _places(graph)[:1]
    for before, after in itertools.pairwise([*firsts, *positions]):
        if after <= before:
            found = f"{graph.layers[after].name!r} does not come after {graph.layers[before].name!r}"
            raise PlanError("cuts", found, "name later layers later; the first stage needs a layer too")
    return tuple(positions)


def cuts_from_counts(n: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the first layer of each stage but the first, given how many of the n layers each stage gets."""
    if sum(counts) != n or min(counts, default=0) < 1:
        remedy = f"give counts of at least 1 that sum to {n}"
        raise PlanError("cuts", f"counts {','.join(map(str, counts))} for {n} layers", remedy)
    return tuple(itertools.accumulate(counts))[:-1]


def _find(graph: Graph, name: str) -> int:
    if name in graph.index and graph[name].kind is not Kind.INPUT:
        return graph.index[name]
    for i, layer in enumerate(graph.layers):
        if layer.name.startswith(f"{name}.") or f"{layer.module}.".startswith(f"{name}."):
            return i
    known = [layer.name for layer in graph.layers if layer.kind is not Kind.INPUT]
    close = difflib.get_close_matches(name, known, n=3) or known[1:4]
    raise PlanError("cuts", f"the network has no layer {name!r}", f"it has for example {', '.join(close)}")


def _places(graph: Graph) -> list[int]:
    """Return the positions of the layers that stages are made of."""
    return [i for i, layer in enumerate(graph.layers) if layer.kind is not Kind.INPUT]


def _inside_results(graph: Graph) -> dict[int, str]:
    """Return the positions at which a nested result is not taken apart yet, and who made it.

    Only single tensors travel between stages.
    """
    found: dict[int, str] = {}
    for layer in graph.layers:
        readers = graph.readers[layer.name] if len(layer.outputs) > 1 else ()
        last = max((graph.index[name] for name in readers), default=0)
        found |= dict.fromkeys(range(graph.index[layer.name] + 1, last + 1), layer.name)
    return found


def _taken_apart(graph: Graph, cuts: Sequence[int]) -> tuple[int, ...]:
    """Return given cuts, or say which of them parts a nested result from those who take it apart."""
    inside = _inside_results(graph)
    for at in cuts:
        if at in inside:
            behind = next((i for i in range(at, len(graph.layers)) if i not in inside), None)
            after = "" if behind is None else f", or before {graph.layers[behind].name!r}"
            raise PlanError(
                "cuts",
                f"the layer {inside[at]!r} returns several tensors, and {graph.layers[at].name!r} takes them "
                "apart: a cut between them would send all in one",
                f"cut before {inside[at]!r}{after}",
            )
    return tuple(cuts)


def crossing_bytes(graph: Graph) -> list[int]:
    """Return for every position the bytes of the values made before it and read at or behind it."""
    changes = [0] * (len(graph.layers) + 1)
    last: dict[str, int] = {}
    for i, layer in enumerate(graph.layers):
        for operand in layer.operands:
            if operand.origin is Source.VALUE:
                last[operand.source] = i
    for name, end in last.items():
        layer = graph[name]
        if layer.kind is not Kind.INPUT:
            size = sum(spec.nbytes for spec in layer.outputs)
            changes[graph.index[name] + 1] += size
            changes[end + 1] -= size
    return list(itertools.accumulate(changes))


__all__ = [
    "choose_cuts",
    "cut",
    "cuts_from_counts",
    "cuts_from_names",
    "layer_cost",
    "shared_parameters",
    "stage_edges",
    "stage_layers",
]
