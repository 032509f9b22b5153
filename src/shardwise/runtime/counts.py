"""The denominators of losses over a whole mini-batch, counted before its first forward pass.

How many targets count, and with what weight, is known from the targets alone. So the ranks that compute
the loss count those of their micro-batches first, add them up over all micro-batches and replicas, and
every micro-batch then divides by the same number: the mean is that of one device, not a mean of means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.geometry import Box
from shardwise.graph import Graph, Kind, Layer, Source
from shardwise.graph.interpret import call
from shardwise.plan import direction_of
from shardwise.plan.stages import stage_layers
from shardwise.program.losses import is_counted, is_summed, scale_name
from shardwise.program.lowered import Lowered
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.store import Store

Feed = Callable[[str, Box], Tensor]
"""Return a box of an input, in coordinates of the whole mini-batch."""


@dataclass(frozen=True)
class _Counted:
    stage: int
    name: str
    targets: tuple[str, ...]


class Counts:
    """Know the scale of every loss of a share of the mini-batch."""

    def __init__(self, lowered: Lowered, fabric: Fabric, store: Store) -> None:
        self.lowered, self.fabric, self.store = lowered, fabric, store
        self.replica, _ = fabric.mesh.place(fabric.rank)
        self._counted: list[_Counted] = []
        self._summed: list[str] = []
        self.scales: dict[str, Tensor] = {}
        for stage, layers in enumerate(stage_layers(lowered.graph, lowered.cuts)):
            for layer in layers:
                if is_counted(layer):
                    chain = target_chain(lowered.graph, layer)
                    inputs = tuple(name for name in chain if lowered.graph[name].kind is Kind.INPUT)
                    self._counted.append(_Counted(stage, layer.name, inputs))
                elif is_summed(layer):
                    self._summed.append(layer.name)
                else:
                    continue
                narrow = layer.spec.dtype in ("float16", "bfloat16")
                dtype = torch.float32 if narrow else getattr(torch, layer.spec.dtype)
                self.scales[scale_name(layer.name)] = torch.ones((), dtype=dtype, device=store.device)
        stages = sorted({counted.stage for counted in self._counted})
        self._groups = {stage: fabric.mesh.reduction_group(stage) for stage in stages}
        fabric.adopt(self._groups.values())
        self._totals: dict[str, float] = {}

    @property
    def inputs(self) -> list[tuple[int, str]]:
        """Return the stages and the inputs that counting reads whole samples of."""
        return [(counted.stage, name) for counted in self._counted for name in counted.targets]

    def exchange(self, feed: Feed) -> None:
        """Count the targets of a mini-batch; collective over the ranks of the stages that have losses."""
        for stage, ranks in self._groups.items():
            if self.fabric.rank not in ranks:
                continue
            mine = [counted for counted in self._counted if counted.stage == stage]
            totals = torch.zeros(len(mine), dtype=torch.float64, device=self.store.device)
            for m in range(self.lowered.program.micro_batches):
                group = self.fabric.mesh.group(self.replica, stage, direction_of(self.lowered.plan, m))
                lo, hi = self.lowered.samples(self.replica, m)
                if group[0] == self.fabric.rank and hi > lo:
                    for i, counted in enumerate(mine):
                        totals[i] += self._count(counted, lo, hi, feed)
            self.fabric.wire(ranks).all_reduce(totals)
            self._totals.update(zip((c.name for c in mine), totals.tolist(), strict=True))

    def _count(self, counted: _Counted, lo: int, hi: int, feed: Feed) -> Tensor:
        graph = self.lowered.graph.with_batch(hi - lo)
        layer = graph[counted.name]
        values: dict[str, Tensor] = {}
        for name in target_chain(graph, layer):
            made = graph[name]
            if made.kind is Kind.INPUT:
                box = Box.whole(made.shape).shift((lo, *(0,) * (len(made.shape) - 1)))
                values[name] = feed(name, box).to(self.store.device)
            else:
                values[name] = call(made, [values[source] for source in made.inputs], {})
        weight = layer.operand("weight")
        held = None if weight is None else self.store.tensors[weight.source]
        return count_targets(values[layer.operands[1].source], layer.attributes["ignore_index"], held)

    def set(self, micro_batch: int) -> None:
        """Let the losses of one micro-batch divide by the right numbers."""
        lo, hi = self.lowered.samples(self.replica, micro_batch)
        share = (hi - lo) / self.lowered.batch
        for name in self._summed:
            self.scales[scale_name(name)].fill_(1.0 / share if share else 0.0)
        for name, total in self._totals.items():
            scale = 0.0 if not share else 1.0 / (total * share) if total else float("nan")
            self.scales[scale_name(name)].fill_(scale)


def count_targets(target: Tensor, ignore: int, weight: Tensor | None) -> Tensor:
    """Return the weight of the targets that count."""
    counts = target != ignore
    if weight is None:
        return counts.sum().double()
    return weight.detach()[target[counts]].double().sum()


def target_chain(graph: Graph, layer: Layer) -> tuple[str, ...]:
    """Return the layers from which the target of a loss is computed, in order, inputs included.

    Raises:
        ValueError: if the target is computed by the network, so that it is not known beforehand.
    """
    wanted = {layer.operands[1].source}
    chain: list[str] = []
    for name in reversed([made.name for made in graph.layers]):
        if name not in wanted:
            continue
        if any(operand.origin is not Source.VALUE for operand in graph[name].operands):
            raise ValueError(
                f"loss {layer.name!r}: its target comes from layer {name!r} of the network, so how many "
                "targets count is not known before the forward pass; use one micro-batch and one replica"
            )
        chain.append(name)
        wanted.update(graph[name].inputs)
    return tuple(reversed(chain))
