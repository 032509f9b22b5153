"""Choose a plan for a job: the best of the search, with the reasons in words."""

from __future__ import annotations

from shardwise.graph import Graph
from shardwise.machine import Machine
from shardwise.oracle.kernels import KernelTimes
from shardwise.oracle.prediction import Prediction, seconds_text
from shardwise.oracle.search.search import search
from shardwise.plan import Plan


def choose(
    graph: Graph,
    machine: Machine | str,
    ranks: int,
    batch: int | None = None,
    *,
    kernels: KernelTimes | None = None,
    memory: float | None = None,
    optimizer_slots: float = 1.0,
) -> tuple[Plan, Prediction, tuple[str, ...]]:
    """Return the fastest plan that uses all ranks and fits, its prediction, and why it was chosen.

    Args:
        graph: the network with its loss.
        machine: a `Machine`, a preset's name or a TOML file.
        ranks: of the job; all of them are used, because a job cannot send ranks home.
        batch: samples of the global mini-batch; default: those of the graph.
        kernels: times of computations; default a roofline of the machine's device.
        memory: bytes that a rank may use; default: what the device has.
        optimizer_slots: copies of the parameters that the optimizer keeps.
    """
    ranking = search(
        graph,
        machine,
        ranks,
        batch,
        memory=memory,
        kernels=kernels,
        optimizer_slots=optimizer_slots,
        all_ranks=True,
        keep=3,
    )
    best = ranking.best
    counts = ranking.counts
    reasons = [
        f"{best.plan}: {seconds_text(best.step_seconds)} per step, the fastest of {counts.enumerated} plans "
        f"({counts.refused} refused, {counts.pruned} cannot be faster)."
    ]
    for other in ranking.entries[1:]:
        slower = 100 * (other.step_seconds / best.step_seconds - 1)
        reasons.append(f"{other.plan} would be {slower:.0f} % slower.")
    reasons.append(best.bottleneck)
    return best.plan, best.prediction, tuple(reasons)
