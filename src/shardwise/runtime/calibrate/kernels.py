"""Time the kernels of a program at their local shapes, with all cores busy and operands outside of cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.oracle.kernels import WEIGHTED, Direction, Task
from shardwise.oracle.profile import Measured, Profile, key_of, measured
from shardwise.runtime.calibrate.bind import bound, portable, tensors_of
from shardwise.runtime.calibrate.clock import clock, spread, typical
from shardwise.runtime.calibrate.job import measure
from shardwise.runtime.poller import cores

# Sets of operands are used in turn so that together they exceed the last-level cache.
_FOOTPRINT_BYTES = 48 << 20
_MOST_SETS = 12
Times = tuple[dict[str, float], dict[str, float]]


def profile_kernels(
    profile: Profile,
    tasks: Iterable[Task],
    *,
    seconds: float,
    ranks: int | None = None,
) -> list[Task]:
    """Measure what the profile lacks, largest first, for at most about `seconds`; return what is left.

    Args:
        profile: measurements are added to it; saving is up to the caller.
        tasks: what a program computes.
        seconds: budget of this call.
        ranks: processes that measure the same at once; default one per core.
    """
    size = ranks or cores()
    todo = profile.missing(tasks)
    if not todo:
        return []
    function = f"{__name__}:time_tasks"
    arguments = ([portable(task) for task in todo], seconds)
    found = measure(
        function, arguments, size=size, transport="gloo", seconds=seconds, threads=profile.threads
    )
    done = len(found[0])
    for i, task in enumerate(todo[:done]):
        profile.add(key_of(task), _worst([result[i] for result in found], task))
    return todo[done:]


def _worst(results: Sequence[Times], task: Task) -> Measured:
    """Take the slower rank: ranks meet again and again, and then the slower one counts."""
    seconds = {d: max(r[0].get(d, 0.0) for r in results) for d in results[0][0]}
    spread = {d: max(r[1].get(d, 0.0) for r in results) for d in results[0][1]}
    return measured(task, seconds, spread)


def time_tasks(arguments: Any) -> list[Times]:
    """Be one rank: time every task while the other ranks time the same one, until the time is up."""
    tasks, seconds = arguments
    results: list[Times] = []
    end = time.perf_counter() + seconds
    for i, task in enumerate(tasks):
        left = torch.tensor([end - time.perf_counter()])
        if dist.is_initialized():
            # All ranks go by one clock: they measure the same and stop together.
            dist.broadcast(left, 0)
        if results and left <= 0:
            break
        results.append(time_task(task, max(0.02, float(left) / (len(tasks) - i))))
    return results


def time_task(task: Task, seconds: float) -> Times:
    """Return the typical seconds and the spread of each direction of a task."""
    weighted = task.layer.kind in WEIGHTED
    forward, both = _rounds(task, True, seconds * (0.65 if weighted else 1.0))
    times = {Direction.FORWARD.value: forward, Direction.BACKWARD_INPUT.value: both}
    if weighted:
        _, weight = _rounds(task, False, seconds * 0.35)
        rest = [max(0.0, b - typical(weight)) for b in both]
        times = {
            Direction.FORWARD.value: forward,
            Direction.BACKWARD_INPUT.value: rest,
            Direction.BACKWARD_WEIGHT.value: weight,
        }
    middle = {direction: typical(values) for direction, values in times.items()}
    return middle, {direction: spread(values) for direction, values in times.items()}


def _rounds(task: Task, input_grad: bool, seconds: float) -> tuple[list[float], list[float]]:
    """Run forwards of all sets, then backwards of all sets, until the time is up; drop the first round."""
    forward, backward = bound(task)
    device = torch.device("cpu")
    nbytes = max(1.0, task.nbytes(Direction.FORWARD))
    count = int(min(_MOST_SETS, max(2, -(-_FOOTPRINT_BYTES // nbytes))))
    sets = [tensors_of(task, device, input_grad) for _ in range(count)]
    gradient = torch.rand(task.out.shape, dtype=getattr(torch, task.layer.outputs[0].dtype), device=device)
    there: list[float] = []
    back: list[float] = []
    now = clock()
    end = time.perf_counter() + seconds
    first = True
    while first or len(there) < 2 * count or (time.perf_counter() < end and len(there) < 64):
        outs = []
        for tensors in sets:
            start = now()
            outs.append(forward(tensors))
            there.append(now() - start)
        for tensors, out in zip(sets, outs, strict=True):
            start = now()
            backward(out, gradient)
            back.append(now() - start)
            for tensor in tensors:
                tensor.grad = None
        if first:
            first = False
            there.clear()
            back.clear()
    return there, back
