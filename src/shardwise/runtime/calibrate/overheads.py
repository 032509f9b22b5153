"""Software costs that no kernel shows: of an operator, of a run of computations, of updating a parameter."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.graph import capture
from shardwise.graph.attach import attach
from shardwise.graph.loss import capture_loss
from shardwise.oracle.kernels import Task
from shardwise.plan import Plan
from shardwise.program import Compute, StageProgram
from shardwise.program.lowered import lower
from shardwise.runtime.calibrate.chains import Chain
from shardwise.runtime.calibrate.clock import now, repeat
from shardwise.runtime.calibrate.replay import FORWARD, Replay, Times
from shardwise.runtime.calibrate.values import stored
from shardwise.runtime.reducer import Reducer
from shardwise.runtime.session import progress
from shardwise.runtime.stage import BoundStage
from shardwise.runtime.wire import LoneWire, Wires

_LAYERS = 8
_ROUNDS = 15


def operator_overheads() -> tuple[float, float]:
    """Return the cost of one operator on almost no data, forwards and backwards."""
    x = torch.ones(8, requires_grad=True)
    count = 50

    def chain() -> Tensor:
        y = x
        for _ in range(count):
            y = torch.relu(y)
        return y

    there = repeat(chain, 0.2) / count
    both = repeat(lambda: torch.autograd.grad(chain().sum(), x), 0.2) / count
    return there, max(0.0, both - there)


def call_overhead() -> float:
    """Return what differentiating one operation on its own costs beyond its place in a longer graph."""
    x = torch.ones(8)
    count = 50

    def chain() -> None:
        leaf = x.detach().requires_grad_()
        y = leaf.view_as(leaf)
        for _ in range(count):
            y = torch.relu(y)
        edge = torch.autograd.graph.get_gradient_edge(y)
        start = now()
        torch.autograd.backward([edge], [x])
        long.append(now() - start)

    def single() -> None:
        leaf = x.detach().requires_grad_()
        edge = torch.autograd.graph.get_gradient_edge(torch.relu(leaf.view_as(leaf)))
        start = now()
        torch.autograd.backward([edge], [x])
        short.append(now() - start)

    long: list[float] = []
    short: list[float] = []
    repeat(chain, 0.1)
    repeat(single, 0.1)
    return max(0.0, sorted(short)[len(short) // 2] - sorted(long)[len(long) // 2] / count)


def segment_overheads() -> tuple[float, float]:
    """Return what a run of computations between communications costs beyond its operators, both ways."""
    program = _tiny_stage()
    runs = [isinstance(op, Compute) for op in program.ops]
    segments = sum(here and not before for here, before in zip(runs, [False, *runs[:-1]], strict=True))
    chain = Chain.whole(program, 0)
    tasks = {key for key, what in chain.keys().items() if isinstance(what, Task)}
    replay = Replay(chain, call_overhead())
    replay.prepare()
    times: Times = {}
    for _ in range(_ROUNDS):
        replay.round(times)
    alone = {True: 0.0, False: 0.0}
    for (key, direction), values in times.items():
        if key in tasks:
            alone[direction == FORWARD] += statistics.median(values) * len(values) / _ROUNDS
    there, back = _stage_times(program, replay.tensors)
    return (
        max(0.0, there - alone[True]) / segments,
        max(0.0, back - alone[False]) / segments,
    )


def gradient_overhead() -> float:
    """Return what it costs to note that one gradient of those that are summed is complete."""
    program = _tiny_stage()
    tensors = stored(Chain.whole(program, 0))
    parameters = {n: t for n, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
    wire = LoneWire()
    reducer = Reducer(parameters, dict.fromkeys(parameters, wire), [list(reversed(parameters))])

    def ready(name: str) -> None:
        reducer.ready(name)
        progress()

    without = _stage_times(program, tensors)[1]
    noting = _stage_times(program, tensors, ready, reducer.finish)[1]
    return max(0.0, noting - without) / len(parameters)


def _stage_times(
    program: StageProgram,
    tensors: dict[str, Tensor],
    ready: Callable[[str], None] | None = None,
    finish: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Return the times of a stage as the runtime executes it, without messages."""
    wire = LoneWire()
    stage = BoundStage(program, 0, tensors, Wires(wire, wire, wire), torch.device("cpu"))
    there: list[float] = []
    back: list[float] = []
    arrivals = {
        slot: torch.ones(held.stored(0).shape, dtype=getattr(torch, held.spec.dtype))
        for slot, held in program.arrivals.items()
    }
    for _ in range(_ROUNDS):
        for tensor in tensors.values():
            tensor.grad = None
        start = now()
        out, tape = stage.forward(arrivals)
        middle = now()
        stage.backward(tape, {name: torch.ones_like(value) for name, value in out.items()}, ready)
        finish()
        there.append(middle - start)
        back.append(now() - middle)
    return statistics.median(there), statistics.median(back)


def _tiny_stage() -> StageProgram:
    """Return a stage of many short computations with shared statistics in between."""
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU()]
    model = nn.Sequential(*layers)
    x = torch.ones(2, 2, 2, 2)
    graph = capture(model, x, training=True, check=False)
    loss = capture_loss(nn.MSELoss(), graph.output_specs, x, check=False)
    return lower(attach(graph, loss), Plan.parse("data=2")).stage(0, 0, 0)
