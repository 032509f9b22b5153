"""Time what one rank does alone, while all cores of the node do the same."""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise.machine import Curve, Device
from shardwise.runtime.calibrate.baseline import baseline_bytes
from shardwise.runtime.calibrate.clock import repeat
from shardwise.runtime.calibrate.job import measure
from shardwise.runtime.calibrate.overheads import gradient_overhead, operator_overheads, segment_overheads
from shardwise.runtime.calibrate.updates import SIZES, update_link, update_seconds, update_times
from shardwise.runtime.doctor import memory_bytes
from shardwise.runtime.poller import cores

# (batch, channels, filters, side): from a few million to ten billion operations, as in real networks.
_CONVOLUTIONS = ((1, 16, 16, 16), (2, 32, 32, 28), (2, 64, 64, 56), (4, 128, 128, 56), (8, 256, 256, 56))
_LINEARS = ((4, 256, 256), (32, 1024, 1024), (128, 2048, 2048))
_COPY_BYTES = 64 << 20


def measure_device(ranks: int, seconds: float) -> tuple[Device, float]:
    """Return what one of `ranks` ranks of this node can do while the others are busy too.

    Beside it the bytes of samples in memory that all of them together put into mini-batches in a second.
    """
    function = f"{__name__}:time_device"
    found = measure(function, seconds, size=ranks, transport="gloo", seconds=seconds)
    mean = {
        name: statistics.mean(r[name] for r in found)
        for name in found[0]
        if name not in ("curves", "updates")
    }
    best = max(rate for r in found for points in r["curves"].values() for _, rate in points)
    peaks = {"float32": max(mean["peak float32"], best), "float64": mean["peak float64"]}
    curves = {
        name: _curve([r["curves"][name] for r in found], peaks["float32"]) for name in found[0]["curves"]
    }
    update = update_link([r["updates"] for r in found])
    device = Device(
        name=device_name(),
        peak_flops=peaks,
        memory_bytes=memory_bytes() / ranks,
        memory_bandwidth=mean["memory_bandwidth"],
        baseline_bytes=baseline_bytes(),
        overhead_forward_seconds=mean["overhead_forward_seconds"],
        overhead_backward_seconds=mean["overhead_backward_seconds"],
        efficiency=curves,
        update_bytes_per_second=update.bytes_per_second,
        update=update,
        overhead_segment_forward_seconds=mean["overhead_segment_forward_seconds"],
        overhead_segment_backward_seconds=mean["overhead_segment_backward_seconds"],
        overhead_gradient_seconds=mean["overhead_gradient_seconds"],
        alone_speedup=max(1.0, found[0]["alone_speedup"]),
        update_alone_speedup=max(1.0, found[0]["update_alone_speedup"]),
        threads=max(1, cores() // ranks),
        host=True,
    )
    return device, ranks * mean["input"]


def device_name() -> str:
    """Return the processor's name as the system gives it, with the version of torch that drives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()}, torch {torch.__version__}"


def _curve(ranks: list[list[tuple[float, float]]], peak: float) -> Curve:
    """Turn operations per second over size into a fraction of the peak."""
    points = []
    for column in zip(*ranks, strict=True):
        rate = statistics.mean(rate for _, rate in column)
        points.append((column[0][0], min(1.0, rate / peak)))
    return Curve(tuple(sorted(points)))


def time_device(seconds: float) -> dict[str, Any]:
    """Be one rank: time everything, each after a barrier so that the other ranks are busy too."""
    share = seconds / (8 + len(_CONVOLUTIONS) + len(_LINEARS))
    found: dict[str, Any] = {}
    found["memory_bandwidth"] = _together(_copy_rate, share)
    found["input"] = _together(_input_rate, share / 4)
    # The speed of memory wavers over seconds where others share it: look at it three times.
    updates = [_together(update_times, 4 / 3 * share)]
    forward, backward = operator_overheads()
    found["overhead_forward_seconds"], found["overhead_backward_seconds"] = forward, backward
    forward, backward = _together(lambda _: segment_overheads(), share)
    found["overhead_segment_forward_seconds"], found["overhead_segment_backward_seconds"] = forward, backward
    found["overhead_gradient_seconds"] = gradient_overhead()
    found["alone_speedup"] = _alone_speedup(_train, share)
    found["update_alone_speedup"] = _alone_speedup(_update, share)
    updates.append(_together(update_times, 4 / 3 * share))
    for dtype in ("float32", "float64"):
        found[f"peak {dtype}"] = _together(partial(_matrix_rate, dtype), share / 2)
    curves: dict[str, list[tuple[float, float]]] = {}
    kinds = (("convolution", _convolution, _CONVOLUTIONS), ("linear", _linear, _LINEARS))
    for kind, run, shapes in kinds:
        for shape in shapes:
            start = time.perf_counter()
            _add(curves, kind, *_together(partial(run, shape), share))
            if _agreed(time.perf_counter() - start > 3 * share):
                break
    found["curves"] = curves
    updates.append(_together(update_times, 4 / 3 * share))
    found["updates"] = {n: statistics.mean(visit[n] for visit in updates) for n in SIZES}
    return found


def _together(run: Callable[[float], Any], seconds: float) -> Any:
    if dist.is_initialized():
        dist.barrier()
    return run(seconds)


def _agreed(wish: bool) -> bool:
    """Return what rank 0 wishes, so that all ranks go on to the same measurement."""
    flag = torch.tensor([wish])
    if dist.is_initialized():
        dist.broadcast(flag, 0)
    return bool(flag)


def _copy_rate(seconds: float) -> float:
    source, target = torch.ones(_COPY_BYTES // 4), torch.empty(_COPY_BYTES // 4)
    return 2 * _COPY_BYTES / repeat(lambda: target.copy_(source), seconds)


def _input_rate(seconds: float) -> float:
    """Return the bytes of samples that are put into mini-batches in a second, none of them in a cache."""
    sample = torch.ones(3, 224, 224)
    samples = [sample.clone() for _ in range(_COPY_BYTES // sample.nbytes)]
    batches = itertools.cycle(samples[i : i + 8] for i in range(0, len(samples) - 7, 8))
    return 8 * sample.nbytes / repeat(lambda: torch.stack(next(batches)), seconds)


def _alone_speedup(run: Callable[[float], float], seconds: float) -> float:
    """Return how much faster rank 0 does something while all others wait for it."""
    busy: float = _together(run, seconds / 2)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 1.0
    dist.barrier()
    alone = run(seconds / 2) if dist.get_rank() == 0 else busy
    dist.barrier()
    return busy / alone


def _train(seconds: float) -> float:
    """Return how long a step of a small block takes."""
    x = torch.rand(4, 64, 56, 56)
    block = torch.nn.Sequential(
        torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(),
        torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(),
    )  # fmt: skip
    return repeat(lambda: block(x).sum().backward(), seconds)


def _update(seconds: float) -> float:
    """Return how long the update of parameters takes that are in no cache."""
    return update_seconds(SIZES[-1], seconds)


def _matrix_rate(dtype: str, seconds: float) -> float:
    side = 768
    a = torch.ones(side, side, dtype=getattr(torch, dtype))
    return 2 * side**3 / repeat(lambda: a @ a, seconds)


def _convolution(shape: tuple[int, ...], seconds: float) -> tuple[float, dict[str, float]]:
    batch, channels, filters, side = shape
    x, w = torch.rand(batch, channels, side, side), torch.rand(filters, channels, 3, 3)
    flops = 2.0 * batch * filters * channels * 9 * side * side
    return flops, _directions(lambda a, b: F.conv2d(a, b, padding=1), x, w, flops, seconds)


def _linear(shape: tuple[int, ...], seconds: float) -> tuple[float, dict[str, float]]:
    rows, channels, filters = shape
    flops = 2.0 * rows * channels * filters
    return flops, _directions(
        F.linear, torch.rand(rows, channels), torch.rand(filters, channels), flops, seconds
    )


def _directions(
    run: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, flops: float, seconds: float
) -> dict[str, float]:
    """Return operations per second of forward, input gradient and weight gradient."""
    rates = {"": flops / repeat(lambda: run(x, w), seconds / 3)}
    gradient = torch.ones_like(run(x, w))
    for name, wanted in (("/backward_input", x), ("/backward_weight", w)):
        wanted.requires_grad_(True)
        out = run(x, w)

        def backward(out: Tensor = out, wanted: Tensor = wanted) -> None:
            torch.autograd.grad(out, wanted, gradient, retain_graph=True)

        rates[name] = flops / repeat(backward, seconds / 3)
        wanted.requires_grad_(False)
    return rates


def _add(
    curves: dict[str, list[tuple[float, float]]], kind: str, flops: float, rates: dict[str, float]
) -> None:
    for suffix, rate in rates.items():
        curves.setdefault(f"{kind}{suffix}", []).append((flops, rate))
