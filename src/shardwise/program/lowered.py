"""Lower a whole training step: the actions of every rank and the operations of every stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.graph import Graph
from shardwise.plan import Plan
from shardwise.plan.cutting import choose_cuts, stage_edges, stage_layers
from shardwise.plan.micro_batches import samples_of
from shardwise.program.actions import Program
from shardwise.program.build import build
from shardwise.program.lower import lower_stage
from shardwise.program.ops import StageProgram


@dataclass(frozen=True)
class Lowered:
    """A step of a plan for one shape of the mini-batch, free of tensors: what runs, and what is priced.

    Args:
        graph: network and loss for the whole mini-batch.
        plan: how it is split.
        cuts: index of the first layer of each stage but the first.
        program: the actions of every rank of a replica.
        input_gradients: whether backward goes on to the model's own inputs.
    """

    graph: Graph
    plan: Plan
    cuts: tuple[int, ...]
    program: Program
    input_gradients: bool = False
    _stages: dict[tuple[int, int, int], StageProgram] = field(default_factory=dict, repr=False)

    @property
    def batch(self) -> int:
        """Return the number of samples of the mini-batch."""
        return self.graph.batch

    def samples(self, replica: int, micro_batch: int) -> tuple[int, int]:
        """Return the range of samples of one micro-batch in the mini-batch."""
        return samples_of(self.plan, self.batch, replica, micro_batch)

    def stage(self, stage: int, replica: int, micro_batch: int) -> StageProgram:
        """Return what the group of one stage does with one micro-batch."""
        lo, hi = self.samples(replica, micro_batch)
        shared = 0
        if self.plan.data > 1:
            parts = [self.samples(r, micro_batch) for r in range(self.plan.data)]
            shared = sum(b - a for a, b in parts)
        key = (stage, hi - lo, shared)
        if key not in self._stages:
            graph = self.graph.with_batch(hi - lo)
            self._stages[key] = lower_stage(
                graph,
                stage_layers(graph, self.cuts)[stage],
                self.plan.stages[stage],
                departures=self.departures(stage),
                tail=self.plan.tail,
                batch_norm=self.plan.batch_norm,
                halo=self.plan.halo,
                samples=shared or None,
                differentiable=self._differentiable(stage),
                shared=self.program.training and self.plan.data * self.program.micro_batches > 1,
            )
        return self._stages[key]

    def _differentiable(self, stage: int) -> list[str]:
        """Return the values from outside of a stage that need a gradient."""
        values = [e.value for e in self.program.edges if e.target == stage and e.differentiable]
        if self.input_gradients:
            values += [layer.name for layer in self.graph.inputs if layer.spec.is_float]
        return values

    def departures(self, stage: int) -> tuple[str, ...]:
        """Return the values that are wanted outside of a stage: by other stages, or by the user."""
        values = [e.value for e in self.program.edges if e.source == stage]
        mine = {layer.name for layer in stage_layers(self.graph, self.cuts)[stage]}
        values += [name for name in self.graph.output_names if name in mine]
        return tuple(dict.fromkeys(values))


def lower(
    graph: Graph,
    plan: Plan,
    cuts: Sequence[int] | None = None,
    *,
    training: bool = True,
    input_gradients: bool = False,
) -> Lowered:
    """Lower one step of a plan on a network (with its loss, for training)."""
    chosen = tuple(cuts) if cuts is not None else choose_cuts(graph, plan)
    edges = stage_edges(graph, chosen)
    program = build(plan, edges, training=training)
    return Lowered(graph, plan, chosen, program, input_gradients)


__all__ = ["Lowered", "lower"]
