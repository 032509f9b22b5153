"""Predict a step of any plan: lower it, price it, simulate it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

from shardwise.graph import Graph
from shardwise.machine import Curve, Machine
from shardwise.oracle.bottleneck import explain
from shardwise.oracle.breakdown import breakdowns
from shardwise.oracle.events import Span, end_of, simulate
from shardwise.oracle.kernels import KernelTimes, Roofline
from shardwise.oracle.memo import Memo
from shardwise.oracle.memory import Footprint
from shardwise.oracle.occupancy import step_memory
from shardwise.oracle.prediction import Prediction
from shardwise.oracle.stage_price import StagePrice
from shardwise.oracle.walk import Walk
from shardwise.plan import Plan
from shardwise.plan.check import check
from shardwise.program import StageProgram
from shardwise.program.lowered import Lowered, lower

# Machines without a spread of their own still deserve an interval.
_UNKNOWN = 0.05
_MOST_ORACLES = 8
_MOST_WALKS = 8


class Oracle:
    """Answer for one network on one machine; what was lowered or priced once is remembered.

    Args:
        graph: the network, with its loss behind it for whole training steps.
        machine: what it would run on.
        kernels: times of computations; default a roofline of the machine's device.
        optimizer_slots: copies of the parameters that the optimizer keeps (momentum 1, Adam 2).
    """

    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        kernels: KernelTimes | None = None,
        *,
        optimizer_slots: float = 1.0,
    ) -> None:
        self.graph, self.asked, self.optimizer_slots = graph, machine, optimizer_slots
        self.kernels = kernels if isinstance(kernels, Memo) else Memo(kernels or Roofline(machine.device))
        # What was measured with the computations is of the same moment as they are.
        self.machine = machine.updating(*self.kernels.updates()).summing(self.kernels.sums())
        self._graphs: dict[int, Graph] = {graph.batch: graph}
        self._steps: OrderedDict[tuple[Plan, int], Lowered] = OrderedDict()
        self._programs: dict[tuple[object, ...], StageProgram] = {}
        self._crowds: dict[int, tuple[Machine, dict[tuple[object, ...], StagePrice]]] = {}
        self._sizes: dict[int, tuple[Footprint, ...]] = {}
        self._walks: OrderedDict[tuple[Plan, int, int], Walk] = OrderedDict()

    def at(self, batch: int) -> Graph:
        """Return the network for a mini-batch of so many samples."""
        if batch not in self._graphs:
            self._graphs[batch] = self.graph.with_batch(batch)
        return self._graphs[batch]

    def lowered(self, plan: Plan, batch: int) -> Lowered:
        """Return the step of a plan."""
        key = (plan, batch)
        if key not in self._steps:
            self._steps[key] = lower(self.at(batch), plan)
            if len(self._steps) > 64:
                self._steps.popitem(last=False)
        return self._steps[key]

    def stage(self, step: Lowered, stage: int, replica: int, micro_batch: int) -> StageProgram:
        """Return a lowered stage; plans that cut and split it alike share one."""
        plan, graph = step.plan, step.graph
        bounds = (0, *step.cuts, len(graph.layers))
        lo, hi = step.samples(replica, micro_batch)
        samples = hi - lo
        shared = plan.data * step.program.micro_batches > 1
        others = 0
        if plan.data > 1:
            parts = (step.samples(r, micro_batch) for r in range(plan.data))
            others = sum(b - a for a, b in parts)
        key = (
            bounds[stage : stage + 2], plan.stages[stage], samples, others, shared,
            plan.tail, plan.batch_norm, plan.halo, step.batch if shared else samples,
        )  # fmt: skip
        if key not in self._programs:
            self._programs[key] = step.stage(stage, replica, micro_batch)
        return self._programs[key]

    def walk(self, plan: Plan, batch: int, *, replicas: int | None = None) -> Walk:
        """Return the priced step of a plan; those that were asked for last are kept."""
        count = replicas if replicas is not None else self.simulated_replicas(plan)
        key = (plan, batch, count)
        if key not in self._walks:
            self._walks[key] = self._walk(plan, batch, count)
        self._walks.move_to_end(key)
        if len(self._walks) > _MOST_WALKS:
            self._walks.popitem(last=False)
        return self._walks[key]

    def _walk(self, plan: Plan, batch: int, replicas: int) -> Walk:
        check(plan, self.at(batch), batch=batch, machine=self.machine)
        step = self.lowered(plan, batch)
        known: dict[tuple[int, int, int], StageProgram] = {}

        def stage_of(stage: int, replica: int, micro_batch: int) -> StageProgram:
            key = (stage, replica, micro_batch)
            if key not in known:
                known[key] = self.stage(step, *key)
            return known[key]

        machine, prices = self._crowded(plan)
        return Walk(step, machine, self.kernels, replicas, stage_of, prices, self._sizes)

    def ranks_per_node(self, ranks: int) -> int:
        """Return how many ranks share a node's cores."""
        return self.machine.ranks_per_node(ranks)

    def memory_per_rank(self, ranks: int) -> float:
        """Return what each of so many ranks has; where they outnumber the devices of a host they share."""
        return self.machine.memory_per_rank(ranks)

    def simulated_replicas(self, plan: Plan) -> int:
        """Return how many replicas must be simulated: all where they share cores, else one stands for all."""
        return plan.data if self.machine.shared_cores(plan.ranks) else 1

    def on(self, machine: Machine) -> Oracle:
        """Return an oracle for another network between the same devices, with the same lowered stages."""
        other = Oracle(self.graph, machine, self.kernels, optimizer_slots=self.optimizer_slots)
        other._graphs, other._steps, other._programs = self._graphs, self._steps, self._programs
        other._sizes = self._sizes
        return other

    def seconds(self, plan: Plan, batch: int) -> float:
        """Return only the step's seconds."""
        return end_of(self._simulate(self.walk(plan, batch), plan))

    def quick(self, plan: Plan, batch: int) -> tuple[float, float]:
        """Return the step's seconds and the bytes of the fullest rank, and nothing else."""
        walk = self.walk(plan, batch)
        memory = (sum(m.values()) for m in self._memory(walk))
        return end_of(self._simulate(walk, plan)), max(memory)

    def _memory(self, walk: Walk) -> tuple[Mapping[str, float], ...]:
        baseline, slots = self.machine.device.baseline_bytes, self.optimizer_slots
        return tuple(
            step_memory(walk, position, optimizer_slots=slots, baseline_bytes=baseline)
            for position in range(walk.mesh.positions)
        )

    def _simulate(self, walk: Walk, plan: Plan) -> tuple[Span, ...]:
        """Return what every rank does when; a step that was simulated alike before is not again."""
        machine, _ = self._crowded(plan)
        cores = machine.node.cores if machine.device.host else 0
        per_node, jitter = self.ranks_per_node(plan.ranks), self._jitter(machine, walk)
        key = (cores, per_node, jitter)
        if key not in walk.spans:
            walk.spans[key] = simulate(
                walk.events, cores=cores, ranks_per_node=per_node, paces=walk.paces, jitter=jitter
            )
        return walk.spans[key]

    def _jitter(self, machine: Machine, walk: Walk) -> Curve | None:
        """Return by which part of their work ranks that meet are late."""
        if any(speed.crowded > 1.0 for speed in walk.paces.values()):
            # What waits take where ranks share cores was measured with the computations.
            return None
        least = self.kernels.lateness() if machine.device.host else ()
        if not least:
            return machine.jitter
        known = Curve(least)
        return known if machine.jitter is None else machine.jitter.at_least(known)

    def crowded(self, plan: Plan) -> Machine:
        """Return the machine as ranks of a plan see it that share a node."""
        return self._crowded(plan)[0]

    def _crowded(self, plan: Plan) -> tuple[Machine, dict[tuple[object, ...], StagePrice]]:
        """Return the machine as ranks of a plan see it that share a node, and the prices known there."""
        crowd = min(self.ranks_per_node(plan.ranks), plan.ranks)
        return self._crowds.setdefault(crowd, (self.machine.with_crowd(crowd), {}))

    def predict(self, plan: Plan | str, batch: int | None = None) -> Prediction:
        """Predict time, memory and bottleneck of one step."""
        plan = Plan.parse(plan)
        machine, _ = self._crowded(plan)
        samples = batch or self.graph.batch
        walk = self.walk(plan, samples)
        lists = walk.events
        spans = self._simulate(walk, plan)
        step = end_of(spans)
        spread = 2 * walk.spread() or _UNKNOWN * step
        fields = walk.fields | {"device.memory_bytes", "device.baseline_bytes"}
        return Prediction(
            step_seconds=step,
            interval=(max(0.0, step - spread), step + spread),
            batch=samples,
            breakdown=breakdowns(spans, sorted(lists), step),
            peak_bytes_by_category=self._memory(walk),
            memory_bytes=self.memory_per_rank(plan.ranks),
            why=partial(
                explain,
                lists,
                spans,
                machine,
                lambda m: self.on(m).seconds(plan, samples),
                cores=machine.node.cores if machine.device.host else 0,
                ranks_per_node=self.ranks_per_node(plan.ranks),
                jitter=self._jitter(machine, walk),
                paces=walk.paces,
            ),
            timeline=spans,
            assumed=machine.assumed(fields),
            flags=tuple(sorted(walk.flags)),
            plan=str(plan),
            machine=machine.name,
        )


_oracles: OrderedDict[tuple[int, int, int, float], Oracle] = OrderedDict()


def oracle_of(
    graph: Graph, machine: Machine, kernels: KernelTimes | None = None, *, optimizer_slots: float = 1.0
) -> Oracle:
    """Return the oracle of a network on a machine, the same one for the same objects."""
    key = (id(graph), id(machine), id(kernels), optimizer_slots)
    found = _oracles.get(key)
    if found is None or found.graph is not graph or found.asked is not machine:
        found = Oracle(graph, machine, kernels, optimizer_slots=optimizer_slots)
        _oracles[key] = found
    _oracles.move_to_end(key)
    while len(_oracles) > _MOST_ORACLES:
        _oracles.popitem(last=False)
    return found


def predict(
    graph: Graph,
    plan: Plan | str,
    machine: Machine | str,
    batch: int | None = None,
    *,
    kernels: KernelTimes | None = None,
    optimizer_slots: float = 1.0,
) -> Prediction:
    """Predict a training step of a network under a plan on a machine.

    Args:
        graph: a captured network; with its loss behind it (`attach`), or its output counts as the end.
        plan: a `Plan` or its one line.
        machine: a `Machine`, a preset's name or a TOML file.
        batch: samples of the global mini-batch; default: those the graph was captured with.
        kernels: times of computations; default a roofline of the machine's device.
        optimizer_slots: copies of the parameters that the optimizer keeps (momentum 1, Adam 2).
    """
    found = oracle_of(graph, Machine.load(machine), kernels, optimizer_slots=optimizer_slots)
    return found.predict(plan, batch)
