"""Run a module split over threads and compare outputs, gradients and buffers with the module itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.geometry import Box
from shardwise.graph import Graph, capture
from shardwise.graph.attach import attach
from shardwise.graph.loss import capture_loss
from shardwise.plan import Plan
from shardwise.program import StageProgram
from shardwise.program.lower import lower_stage
from shardwise.runtime.overlap import Overlap
from shardwise.runtime.rules import Surroundings
from shardwise.runtime.stage import BoundStage
from shardwise.runtime.store import Store, fill_store
from shardwise.runtime.wire import LoneWire, Wires
from thread_ranks import ThreadWire, run_threads

CPU = torch.device("cpu")
LIMIT = 1e-11


@dataclass
class Subject:
    """A captured network with its tensors, inputs and the gradient of its output."""

    graph: Graph
    state: Mapping[str, Tensor]
    modules: Mapping[str, nn.Module]
    inputs: Sequence[Tensor]
    dy: Tensor

    def lower(self, line: str) -> StageProgram:
        """Lower it for the first stage of a plan."""
        plan = Plan.parse(line)
        return lower_stage(
            self.graph,
            self.graph.layers,
            plan.stages[0],
            departures=self.graph.output_names,
            tail=plan.tail,
            batch_norm=plan.batch_norm,
            halo=plan.halo,
            differentiable=[layer.name for layer in self.graph.inputs if layer.spec.is_float],
        )


def subject(model: nn.Module, shape: Sequence[int], seed: int = 0) -> Subject:
    """Capture a module in float64 with random input and output gradient."""
    torch.manual_seed(seed)
    model = model.double()
    x = torch.randn(*shape, dtype=torch.float64)
    with torch.no_grad():
        dy = torch.randn_like(copy.deepcopy(model)(x))
    graph = capture(model, x, training=model.training, check=False)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **dict(graph.constants)}
    return Subject(graph, state, dict(model.named_modules()), [x], dy)


def loss_subject(model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> Subject:
    """Capture a module with its loss."""
    network = capture(model, x, check=False)
    graph = attach(network, capture_loss(loss, network.output_specs, y, check=False))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **dict(graph.constants)}
    if isinstance(loss, nn.Module):
        state |= {f"loss.{name}": tensor for name, tensor in loss.named_buffers()}
    return Subject(graph, state, dict(model.named_modules()), [x, y], torch.ones((), dtype=torch.float64))


def run_split(
    it: Subject,
    program: StageProgram,
    surroundings: Surroundings | None = None,
    overlap: Overlap | None = None,
) -> dict[str, Tensor]:
    """Return output, gradients and buffers as whole tensors, put together from all ranks."""
    given = {layer.name: t for layer, t in zip(it.graph.inputs, it.inputs, strict=True)}
    result: dict[str, Tensor] = {"output": torch.full_like(it.dy, float("nan"))}
    result |= {f"input {n}": torch.zeros_like(t) for n, t in given.items() if t.is_floating_point()}
    parameters = {n: t for n, t in it.state.items() if isinstance(t, nn.Parameter)}
    result |= {f"gradient {n}": torch.zeros_like(p) for n, p in parameters.items()}

    def work(rank: int, wire: ThreadWire) -> None:
        # Threads must not share the model's tensors.
        mine = {
            name: nn.Parameter(t.detach().clone(), t.requires_grad)
            if isinstance(t, nn.Parameter)
            else t.clone()
            for name, t in it.state.items()
        }
        store = Store(CPU)
        fill_store(store, program.parameters, mine, rank)
        fill_store(store, program.buffers, mine, rank)
        placed = surroundings or Surroundings(dict(it.modules))
        stage = BoundStage(program, rank, store.tensors, Wires(wire, wire, LoneWire()), CPU, placed, overlap)
        boxes = {slot: held.layout.box(rank) for slot, held in program.arrivals.items()}
        values = {slot: held.value for slot, held in program.arrivals.items()}
        made, tape = stage.forward({slot: given[values[slot]][b.slices()] for slot, b in boxes.items()})
        ((name, held),) = program.departures.items()
        box = held.layout.box(rank)
        owner = rank == 0 or box != Box.whole(held.layout.shape)
        seed = it.dy[box.slices()] if owner else torch.zeros_like(it.dy)
        grads = stage.backward(tape, {name: seed.clone()})
        with wire.shared.lock:
            result["output"][box.slices()] = made[name]
            for slot, grad in grads.items():
                result[f"input {values[slot]}"][boxes[slot].slices()] += grad
            for key, parameter in store.parameters.items():
                if parameter.grad is not None:
                    result[f"gradient {key}"][store.boxes[key].slices()] += parameter.grad
            for key in program.buffers:
                whole = result.setdefault(f"buffer {key}", it.state[key].clone())
                whole[store.boxes[key].slices()] = store.tensors[key]

    with poisoned():
        run_threads(work, program.width)
    return result


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that is allocated without values with NaN, so that none of it can be used unnoticed."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_whole(it: Subject, compute: Callable[..., Tensor], owner: nn.Module) -> dict[str, Tensor]:
    """Return the same of the user's own code; `compute` is a method or function of `owner`, a copy."""
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in it.inputs]
    out = compute(*leaves)
    out.backward(it.dy)
    result = {"output": out.detach()}
    for layer, leaf in zip(it.graph.inputs, leaves, strict=True):
        if leaf.is_floating_point():
            result[f"input {layer.name}"] = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
    for name, p in owner.named_parameters():
        result[f"gradient {name}"] = p.grad if p.grad is not None else torch.zeros_like(p)
    return result | {f"buffer {name}": b for name, b in owner.named_buffers()}


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Name what differs, with its error."""
    result = []
    for name, want in expected.items():
        if name not in found or not want.numel():
            continue
        scale = max(1.0, float(want.abs().max()))
        error = float((found[name].double() - want.double()).abs().max()) / scale
        if not error <= LIMIT:
            result.append(f"{name} by {error:.1e}")
    return result


def compare(model: nn.Module, shape: Sequence[int], lines: Iterable[str]) -> None:
    """Check a module under several plans against itself."""
    it = subject(model, shape)
    owner = copy.deepcopy(model)
    expected = run_whole(it, owner, owner)
    check(it, expected, lines)


def check(it: Subject, expected: Mapping[str, Tensor], lines: Iterable[str]) -> None:
    """Check a subject under several plans."""
    problems = []
    for line in lines:
        wrong = differences(run_split(it, it.lower(line)), expected)
        problems += [f"{line}: {', '.join(wrong)}"] if wrong else []
    assert not problems, "differs from the unsplit module\n" + "\n".join(problems)
