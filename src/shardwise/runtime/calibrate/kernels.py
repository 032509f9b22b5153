"""Time the kernels of a program at their local shapes, with all cores busy and operands outside of cache."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from statistics import fmean
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
_FOOTPRINT_BYTES = 24 << 20
_MOST_SETS = 4
_FEWEST, _MOST = 4, 60
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
    missing = profile.missing(tasks)
    pairs = [(task, portable(task)) for task in missing]
    todo = [(task, sent) for task, sent in pairs if sent is not None]
    if not todo:
        return missing
    function = f"{__name__}:time_tasks"
    arguments = ([sent for _, sent in todo], seconds)
    found = measure(
        function, arguments, size=size, transport="gloo", seconds=seconds, threads=profile.threads
    )
    done = len(found[0])
    for i, (task, _) in enumerate(todo[:done]):
        times = [result[i] for result in found]
        if isinstance(times[0], str):
            profile.refused[key_of(task)] = times[0]
        else:
            profile.add(key_of(task), _mean(times, task))
    return profile.missing(missing)


def _mean(results: Sequence[Times], task: Task) -> Measured:
    """Put the times of all ranks together; they did the same, so they differ by chance only."""
    seconds = {d: fmean(r[0][d] for r in results) for d in results[0][0]}
    wide = {d: fmean(r[1][d] for r in results) for d in results[0][1]}
    return measured(task, seconds, wide)


def time_tasks(arguments: Any) -> list[Times | str]:
    """Be one rank: time every task while the other ranks time the same one, until the time is up."""
    tasks, seconds = arguments
    results: list[Times | str] = []
    end = time.perf_counter() + seconds
    for i, task in enumerate(tasks):
        left = torch.tensor([end - time.perf_counter()])
        if dist.is_initialized():
            # All ranks go by one clock: they measure the same and stop together.
            dist.broadcast(left, 0)
        if results and left <= 0:
            break
        try:
            results.append(time_task(task, max(0.02, float(left) / (len(tasks) - i))))
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            # An operator that rejects made-up operands is left to the fallback, with its reason.
            results.append(f"{type(error).__name__}: {error}")
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
    """Run forwards of all sets, then backwards of all sets, until the time is up."""
    forward, backward = bound(task)
    device = torch.device("cpu")
    nbytes = max(1.0, task.nbytes(Direction.FORWARD))
    count = int(min(_MOST_SETS, max(2, -(-_FOOTPRINT_BYTES // nbytes))))
    sets = [tensors_of(task, device, input_grad) for _ in range(count)]
    gradient = torch.rand(task.out.shape, dtype=getattr(torch, task.layer.outputs[0].dtype), device=device)
    # The first call of a shape prepares kernels and buffers.
    backward(forward(sets[0]), gradient)
    there: list[float] = []
    back: list[float] = []
    now = clock()
    end = time.perf_counter() + seconds
    while len(there) < _FEWEST or (time.perf_counter() < end and len(there) < _MOST):
        outs: list[Any] = []
        for tensors in sets:
            _drop_gradients(tensors)
            start = now()
            outs.append(forward(tensors))
            there.append(now() - start)
        for tensors in reversed(sets):
            out = outs.pop()
            start = now()
            backward(out, gradient)
            back.append(now() - start)
            # In a step, memory of an activation's gradient is free again at once; weights keep theirs.
            _drop_gradients([t for t in tensors if not isinstance(t, torch.nn.Parameter)])
    return there, back


def _drop_gradients(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None
