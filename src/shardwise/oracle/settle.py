"""Settle what a plan leaves open (`halo=auto`, `tail=auto`, where stages begin) by pricing alternatives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.graph import Layer, Source
from shardwise.oracle.kernels import WEIGHTED, Direction, Task
from shardwise.oracle.predict import Oracle
from shardwise.plan import Plan, PlanError, Way, choose_cuts, micro_batches_of
from shardwise.program import Regrid
from shardwise.program.choices import HALOS, TAILS

# Pipelines with more positions than this keep the rules of the program: simulating them takes too long.
MOST_POSITIONS = 64
# What a plan says itself, and the rules, are kept unless something else is at least this much faster.
_GAIN = 0.002


@dataclass(frozen=True)
class Settled:
    """A plan with nothing left open, its seconds, and the alternatives with theirs."""

    plan: Plan
    step_seconds: float
    priced: tuple[tuple[Plan, float], ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Say what each open question was decided by."""
        return tuple(
            f"{other} would take {100 * (seconds / self.step_seconds - 1):+.1f} %."
            for other, seconds in self.priced
            if other != self.plan and self.step_seconds
        )


def settle(
    oracle: Oracle, plan: Plan | str, batch: int | None = None, memory: float | None = None
) -> Settled:
    """Return the plan with the cheapest halo, tail and cuts of those that fit.

    Args:
        oracle: of the network on the machine.
        plan: its own values are kept; `halo=auto`, `tail=auto` and missing cuts are open.
        batch: samples of the global mini-batch; default: those of the graph.
        memory: bytes that a rank may use; default: what the device has.
    """
    chosen, samples = Plan.parse(plan), batch or oracle.graph.batch
    limit = memory or oracle.machine.memory_per_rank(chosen.ranks)
    tiled = any(split.way is Way.SPATIAL for split in chosen.stages)
    if chosen.halo == "auto" and not tiled:
        chosen = chosen.replace(halo="layer")
    seconds, peak = oracle.quick(chosen, samples)
    priced = [(chosen, seconds)]
    if chosen.ranks // chosen.data > MOST_POSITIONS:
        return Settled(chosen, seconds, tuple(priced))

    def better(alternatives: Iterable[Plan], now: tuple[Plan, float, float]) -> tuple[Plan, float, float]:
        best = now
        for other in alternatives:
            try:
                seconds, peak = oracle.quick(other, samples)
            except PlanError:
                continue  # not every network admits every alternative
            priced.append((other, seconds))
            relieves = best[2] > limit and peak < best[2]
            if relieves or (peak <= max(limit, best[2]) and seconds < best[1] * (1 - _GAIN)):
                best = (other, seconds, peak)
        return best

    now = (chosen, seconds, peak)
    if chosen.halo == "auto":
        # The rule comes last: what says itself what it does is preferred to what does the same.
        explicit = [chosen.replace(halo=halo) for halo in HALOS if halo != "auto"]
        now = better([*explicit, chosen], (chosen, float("inf"), peak))
    if now[0].tail == "auto" and tiled:
        now = better([now[0].replace(tail=tail) for tail in TAILS if tail != "auto"], now)
    if len(chosen.stages) > 1 and not chosen.cuts:
        now = better(_recut(oracle, now[0], samples), now)
    return Settled(now[0], now[1], tuple(priced))


def _recut(oracle: Oracle, plan: Plan, batch: int) -> list[Plan]:
    """Return the plan cut so that the stages' priced seconds are as even as can be."""
    graph = oracle.at(batch)
    share = -(-batch // (plan.data * micro_batches_of(plan)))
    seconds = layer_seconds(oracle, share)
    cuts = choose_cuts(graph, plan, cost=lambda layer: seconds.get(layer.name, 0.0))
    if cuts == choose_cuts(graph, plan):
        return []
    return [plan.replace(cuts=tuple(graph.layers[i].name for i in cuts))]


def layer_seconds(oracle: Oracle, samples: int) -> dict[str, float]:
    """Return the priced seconds of every layer, forward and backward, for so many samples on one rank."""
    step = oracle.lowered(Plan(), samples)
    result: dict[str, float] = {}
    for op in oracle.stage(step, 0, 0, 0).ops:
        if isinstance(op, Regrid):
            continue
        # The terms of a loss belong to the loss.
        name = op.layer.name if op.layer.name in step.graph.index else op.layer.name.rpartition(".")[0]
        result[name] = result.get(name, 0.0) + _both(oracle, Task.of(op, 0), op.layer)
    return result


def _both(oracle: Oracle, task: Task, layer: Layer) -> float:
    directions = [Direction.FORWARD, Direction.BACKWARD_INPUT]
    trained = any(o.origin is Source.PARAMETER for o in layer.operands)
    if layer.kind in WEIGHTED and trained:
        directions.append(Direction.BACKWARD_WEIGHT)
    return sum(oracle.kernels.seconds(task, direction).seconds for direction in directions)
