"""Choose a plan for a job: the best of the search with nothing left open, and the reasons in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.graph import Graph
from shardwise.machine import Machine
from shardwise.oracle.kernels import KernelTimes
from shardwise.oracle.predict import oracle_of
from shardwise.oracle.prediction import Prediction, seconds_text
from shardwise.oracle.search.ranking import Ranking
from shardwise.oracle.search.search import search
from shardwise.oracle.settle import settle
from shardwise.plan import Plan


@dataclass(frozen=True)
class Choice:
    """A plan, what is predicted for it, why it was chosen, and the ranking that it came from."""

    plan: Plan
    prediction: Prediction
    reasons: tuple[str, ...]
    ranking: Ranking

    def __str__(self) -> str:
        return "\n".join([str(self.ranking), *self.reasons])


def choose(
    graph: Graph,
    machine: Machine | str,
    ranks: int,
    batch: int | None = None,
    *,
    kernels: KernelTimes | None = None,
    memory: float | None = None,
    optimizer_slots: float = 1.0,
    refuse: Callable[[Plan], str] | None = None,
    keep: int = 3,
) -> Choice:
    """Choose the fastest plan that uses all ranks and fits; halo, tail and cuts are settled by their prices.

    Args:
        graph: the network with its loss.
        machine: a `Machine`, a preset's name or a TOML file.
        ranks: of the job; all of them are used, because a job cannot send ranks home.
        batch: samples of the global mini-batch; default: those of the graph.
        kernels: times of computations; default a roofline of the machine's device.
        memory: bytes that a rank may use; default: what the device has.
        optimizer_slots: copies of the parameters that the optimizer keeps.
        refuse: says why a plan must not be used, or nothing.
        keep: how many of the best plans are settled and compared.
    """
    where = Machine.load(machine)
    ranking = search(
        graph,
        where,
        ranks,
        batch,
        memory=memory,
        kernels=kernels,
        optimizer_slots=optimizer_slots,
        all_ranks=True,
        keep=keep,
        refuse=refuse,
    )
    oracle = oracle_of(graph, where, kernels, optimizer_slots=optimizer_slots)
    samples = batch or graph.batch
    first = ranking.best
    found = [settle(oracle, entry.plan, samples, memory) for entry in ranking]
    best = min(found, key=lambda settled: settled.step_seconds)
    counts = ranking.counts
    reasons = [
        f"{best.plan}: {seconds_text(best.step_seconds)} per step, the fastest of {counts.enumerated} plans "
        f"({counts.refused} refused, {counts.pruned} cannot be faster)."
    ]
    for other in found:
        if other is not best:
            slower = 100 * (other.step_seconds / best.step_seconds - 1)
            reasons.append(f"{other.plan} would be {slower:.0f} % slower.")
    if best.plan != first.plan:
        reasons += best.reasons[:2]
    prediction = oracle.predict(best.plan, samples)
    reasons.append(prediction.bottleneck)
    return Choice(best.plan, prediction, tuple(reasons), ranking)
