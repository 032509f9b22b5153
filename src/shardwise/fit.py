"""Go: train a model under a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.geometry import Box, Layout, messages
from shardwise.graph import Graph, capture
from shardwise.graph.attach import attach
from shardwise.graph.loss import capture_loss
from shardwise.plan import Plan, mesh_of
from shardwise.program.lowered import Lowered, lower
from shardwise.runtime.engine import Engine
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.reducer import Reducer
from shardwise.runtime.rules import Surroundings
from shardwise.runtime.session import init
from shardwise.runtime.store import Store, fill_store
from shardwise.runtime.wire import Wire

Optimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Loss = Callable[..., Tensor]


class Trainer:
    """Train a model split over the ranks of the job, with the numbers of one device.

    Args:
        model: any module; its parameters are trained in place where a rank holds them whole.
        example: inputs and targets of one mini-batch, `(x, y)`; sizes may differ from step to step.
        plan: how to split it, as a `Plan` or its one line.
        loss: a callable `(output, target) -> scalar`.
        optimizer: a callable that makes an optimizer from (name, parameter) pairs.
        seed: what the masks of dropout start from; they do not depend on the plan.
        input_gradients: whether `input_gradients()` is wanted after each step.
    """

    def __init__(
        self,
        model: nn.Module,
        example: tuple[Any, Any],
        plan: Plan | str = "data=1",
        *,
        loss: Loss,
        optimizer: Optimizer | None = None,
        seed: int = 0,
        input_gradients: bool = False,
    ) -> None:
        self.session = init()
        self.plan = Plan.parse(plan)
        self.model, self.loss = model, loss
        self.device = self.session.device
        x, y = example
        network = capture(model, x, training=True)
        self.graph: Graph = attach(network, capture_loss(loss, network.output_specs, y, check=False))
        self.fabric = Fabric(mesh_of(self.plan))
        self.store = Store(self.device)
        self.surroundings = Surroundings(self._modules(), seed)
        self._wants_input_gradients = input_gradients
        self._input_grads: dict[str, Tensor] = {}
        self._lowered: dict[tuple[tuple[int, ...], ...], Lowered] = {}
        self._engines: dict[tuple[tuple[int, ...], ...], Engine] = {}
        self.reducer: Reducer | None = None
        self.cuts: tuple[int, ...] | None = None
        self.layouts: dict[str, list[tuple[int, Box]]] = {}
        self._prepare()
        trained = list(self.store.named_parameters())
        self.optimizer = optimizer(trained) if optimizer is not None and trained else None
        self.step_seconds: list[float] = []

    def _modules(self) -> dict[str, nn.Module]:
        modules = dict(self.model.named_modules())
        if isinstance(self.loss, nn.Module):
            modules |= {f"loss.{name}": module for name, module in self.loss.named_modules()}
        return modules

    def _state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        state |= dict(self.graph.constants)
        if isinstance(self.loss, nn.Module):
            prefixed = {**dict(self.loss.named_parameters()), **dict(self.loss.named_buffers())}
            state |= {f"loss.{name}": tensor for name, tensor in prefixed.items()}
        return state

    def _prepare(self) -> None:
        """Lower the step for the example, take this rank's parameters in, and join their holders."""
        lowered = self._lower(self.graph.shapes)
        self.cuts = lowered.cuts
        mesh, state = self.fabric.mesh, self._state()
        holders: dict[tuple[str, Box], set[int]] = {}
        order: list[str] = []
        for stage in reversed(range(mesh.stages)):
            program = lowered.stage(stage, 0, 0)
            order += [name for name in reversed(program.parameters) if name not in order]
            for r in range(mesh.data):
                for direction in mesh.directions:
                    for member, rank in enumerate(mesh.group(r, stage, direction)):
                        for name, layout in program.parameters.items():
                            box = layout.box(member)
                            holders.setdefault((name, box), set()).add(rank)
                        if rank == self.fabric.rank:
                            fill_store(self.store, program.parameters, state, member)
                            fill_store(self.store, program.buffers, state, member)
        for (name, box), ranks in sorted(holders.items(), key=lambda item: (item[0][0], item[0][1].lo)):
            self.layouts.setdefault(name, []).extend((rank, box) for rank in sorted(ranks))
        sets = sorted({tuple(sorted(ranks)) for ranks in holders.values() if len(ranks) > 1})
        self.fabric.adopt(sets)
        wires: dict[str, Wire] = {}
        for (name, box), ranks in holders.items():
            if self.fabric.rank in ranks and len(ranks) > 1 and not box.empty:
                wires[name] = self.fabric.wire(sorted(ranks))
        self.reducer = Reducer(self.store.parameters, wires, order)

    def _lower(self, shapes: tuple[tuple[int, ...], ...]) -> Lowered:
        if shapes not in self._lowered:
            self._lowered[shapes] = lower(
                self.graph.at(*shapes), self.plan, self.cuts, input_gradients=self._wants_input_gradients
            )
        return self._lowered[shapes]

    def _engine(self, shapes: tuple[tuple[int, ...], ...]) -> Engine:
        if shapes not in self._engines:
            lowered = self._lower(shapes)
            self._engines[shapes] = Engine(
                lowered, self.fabric, self.store, self.device, self.reducer, self.surroundings
            )
        return self._engines[shapes]

    def step(self, x: Any, y: Any) -> float:
        """Train on one global mini-batch, the same on every rank; return the global mean loss."""
        tensors = [*_flat(x), *_flat(y)]
        shapes = tuple(tuple(t.shape) for t in tensors)
        engine = self._engine(shapes)
        inputs = {layer.name: t for layer, t in zip(self.graph.inputs, tensors, strict=True)}
        self._shapes = {name: tuple(t.shape) for name, t in inputs.items()}
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            for parameter in self.store.parameters.values():
                parameter.grad = None
        start = time.perf_counter()
        update = self.optimizer.step if self.optimizer is not None else None
        loss = engine.step(inputs, update)
        self.fabric.world.all_reduce(loss)
        self.surroundings.step += 1
        self._input_grads = engine.input_grads
        self.step_seconds.append(time.perf_counter() - start)
        return float(loss)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last step as whole tensors by the user's names, on every rank."""
        grads = {name: p.grad for name, p in self.store.parameters.items()}
        return self._gather(self.graph.parameters, grads)

    def input_gradients(self) -> list[Tensor]:
        """Return the gradients of the model's inputs in the last step, whole on every rank."""
        result = []
        for layer in self.graph.inputs:
            if layer.spec.is_float and not layer.name.startswith("loss."):
                shape, dtype = self._shapes[layer.name], getattr(torch, layer.spec.dtype)
                grad = torch.zeros(shape, dtype=dtype, device=self.device)
                if layer.name in self._input_grads:
                    grad += self._input_grads[layer.name]
                self.fabric.world.all_reduce(grad)
                result.append(grad)
        return result

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers as whole tensors by the user's names, on every rank."""
        whole = self._gather({**self.graph.parameters, **self.graph.buffers}, self.store.tensors)
        return {name: tensor for name, tensor in whole.items() if not name.startswith("loss.")}

    def _gather(self, specs: Mapping[str, Any], local: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Bring slices from the ranks that hold them to all ranks."""
        ranks = tuple(range(self.fabric.size))
        result = {}
        for name, spec in specs.items():
            held = dict(self.layouts.get(name) or self._buffer_layout(name))
            if not held:
                continue
            dtype = getattr(torch, spec.dtype)
            mine = local.get(name)
            whole = torch.zeros(spec.shape, dtype=dtype, device=self.device)
            if self.fabric.size == 1:
                result[name] = whole if mine is None else mine.detach().clone()
                continue
            nothing = Box((0,) * len(spec.shape), (0,) * len(spec.shape))
            boxes = tuple(held.get(rank, nothing) for rank in ranks) if spec.shape else None
            if boxes is None:
                owner = min(held)
                if self.fabric.rank == owner and mine is not None:
                    whole.copy_(mine.detach())
                self.fabric.world.all_reduce(whole)
                result[name] = whole
                continue
            src = Layout(spec.shape, boxes, ranks)
            keep = [
                m
                for m in messages(src, Layout(spec.shape, (Box.whole(spec.shape),), (-1,)))
                if not m.box.empty
            ]
            for m in keep:
                if m.source == self.fabric.rank and mine is not None:
                    whole[m.box.slices()] = mine.detach()[m.box.slices(held[m.source])]
            self.fabric.world.all_reduce(whole)
            result[name] = whole
        return result

    def _buffer_layout(self, name: str) -> list[tuple[int, Box]]:
        mesh = self.fabric.mesh
        lowered = next(iter(self._lowered.values()))
        result = []
        for stage in range(mesh.stages):
            layout = lowered.stage(stage, 0, 0).buffers.get(name)
            if layout is not None:
                result += [(rank, layout.box(m)) for m, rank in enumerate(mesh.group(0, stage))]
        return result


def _flat(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, Mapping) else tree
    return [tensor for item in items for tensor in _flat(item)]


def is_first() -> bool:
    """Tell whether this process is rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0
