"""On few ranks the best is that of simulating every plan, because no plan beats its bounds."""

import dataclasses

import pytest
import torch
from oracle_cases import Fixed, machine
from torch import nn

from shardwise.commands.subject import training_graph
from shardwise.graph import capture
from shardwise.machine import Curve, Machine, Node
from shardwise.oracle import Oracle
from shardwise.oracle.search import search
from shardwise.oracle.search.allowance import Allowance
from shardwise.oracle.search.few import Few
from shardwise.oracle.search.kept import Kept
from shardwise.oracle.search.space import candidates
from shardwise.oracle.search.tally import Tally
from shardwise.oracle.search.worlds import legal_rows
from shardwise.plan import PlanError


def norms():
    """Four convolutions with batch norm, for eight samples of 4x8x8."""
    layers = []
    for _ in range(2):
        layers += [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    return capture(nn.Sequential(*layers), torch.zeros(8, 4, 8, 8), check=False)


def classifier():
    """Narrowing convolutions, a linear layer and a loss: tiles end, and ranks share samples behind them."""
    body = [nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1)]
    body += [nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    return training_graph(nn.Sequential(*body), (4, 20, 20), 12)


def fork():
    """Two branches that are added: a stage need not read what the one before it makes."""

    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return torch.relu(self.left(x) + self.right(x)) + x

    return capture(Fork(), torch.zeros(6, 4, 6, 6), check=False)


NETWORKS = {"norms": norms, "classifier": classifier, "fork": fork}


def host(cores, ranks, **fields):
    """Cores that are faster alone than together; ranks that meet are late."""
    device = dataclasses.replace(machine().device, host=True, **fields)
    tier = dataclasses.replace(machine().tiers[0], jitter=Curve(((1e-6, 0.2), (1.0, 0.05))))
    return machine(device=device, node=Node(ranks, cores), tiers=(tier,))


# Machine, kernels: with costly messages, with costly computations, with cores that are shared.
MACHINES = {
    "slow": (machine(), Fixed()),
    "fast": (machine(), Fixed(1e-8, 1e-8, 1e-8)),
    "lassen": (Machine.load("lassen"), None),
    "shared": (host(2, 4), Fixed()),
    "alone": (host(4, 4, alone_speedup=1.4, update_alone_speedup=1.2), None),
    "taking turns": (host(2, 4, alone_speedup=1.3), None),
}


def exhaustive(graph, where, ranks, kernels=None, limit=float("inf")):
    """Predict every plan; return seconds, bytes and ranks of those that fit."""
    oracle, found = Oracle(graph, where, kernels), {}
    for c in candidates(ranks, 2):
        if c.data * c.parts > graph.batch:
            continue
        try:
            seconds, peak = oracle.quick(c.plan(), graph.batch)
        except PlanError:
            continue
        if peak <= limit:
            found[str(c.plan())] = (seconds, peak, c.ranks)
    return found


def score(objective, seconds, peak, ranks):
    return {"time": seconds, "memory": peak, "cost": ranks * seconds}[objective]


def same_best(found, ranking, objective="time"):
    scores = {plan: score(objective, *what) for plan, what in found.items()}
    assert scores[str(ranking.best.plan)] == pytest.approx(min(scores.values()))
    ten = sorted(scores.values())[:10]
    assert [entry.score(objective) for entry in ranking] == pytest.approx(ten)
    counts = ranking.counts
    assert counts.enumerated == sum(1 for _ in candidates(ranking.ranks, 2))
    assert counts.enumerated == counts.refused + counts.pruned + counts.simulated


def front_is_that_of(found, ranking):
    best = {
        what
        for what in found.values()
        if not any(all(a <= b for a, b in zip(w, what, strict=True)) and w != what for w in found.values())
    }
    assert ranking.front_is_complete
    front = [(e.step_seconds, e.peak_bytes, e.ranks) for e in ranking.front]
    assert sorted(front) == [pytest.approx(what) for what in sorted(best)]


CASES = [
    ("norms", "slow", 3),
    ("classifier", "lassen", 3),
    *[("norms", name, 2) for name in ("fast", "lassen")],
    *[("classifier", name, 2) for name in ("slow", "shared", "alone")],
    pytest.param("classifier", "taking turns", 3, marks=pytest.mark.full),
    *[("fork", name, 2) for name in MACHINES],
]


@pytest.mark.parametrize(("network", "name", "ranks"), CASES)
def test_the_best_are_those_of_exhaustive_simulation_by_any_measure(network, name, ranks):
    graph, (where, kernels) = NETWORKS[network](), MACHINES[name]
    found = exhaustive(graph, where, ranks, kernels)
    for objective in ("time", "memory", "cost"):
        same_best(found, search(graph, where, ranks, kernels=kernels, objective=objective), objective)
    front_is_that_of(found, search(graph, where, ranks, kernels=kernels, front=True, keep=1))
    middle = sorted(peak for _, peak, _ in found.values())[len(found) // 2]
    fits = {plan: what for plan, what in found.items() if what[1] <= middle}
    same_best(fits, search(graph, where, ranks, kernels=kernels, memory=middle))


@pytest.mark.full
@pytest.mark.parametrize("name", ["slow", "lassen"])
def test_the_best_is_that_of_exhaustive_simulation_on_eight_ranks(name):
    graph, (where, kernels) = norms(), MACHINES[name]
    same_best(exhaustive(graph, where, 8, kernels), search(graph, where, 8, kernels=kernels))


@pytest.mark.parametrize(("network", "name"), [("norms", "lassen"), *(("classifier", n) for n in MACHINES)])
def test_no_event_simulation_beats_the_bounds_of_its_plan(network, name):
    graph, (where, kernels) = NETWORKS[network](), MACHINES[name]
    oracle = Oracle(graph, where, kernels)
    rows = legal_rows(graph, 4, False, Tally())
    found = {}
    for objective in ("time", "memory"):
        few = Few(oracle, graph.batch, rows, Kept(objective, 10), Allowance(where), Tally())
        for bound in few._bounded():
            found.setdefault(bound.plan, []).append(bound.score)
    checked = 0
    for plan, bounds in list(found.items())[::3]:
        seconds, peak = oracle.quick(plan, graph.batch)
        assert bounds[0] <= seconds, str(plan)
        assert 0 < bounds[1] <= peak, str(plan)
        checked += 1
    assert checked > 50
