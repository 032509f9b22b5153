"""Measure this machine and write it down."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shardwise.machine import Device, Machine, Node, Tier
from shardwise.oracle.profile import cache_path
from shardwise.runtime.calibrate.crew import is_leader
from shardwise.runtime.calibrate.device import measure_device
from shardwise.runtime.calibrate.network import measure_network
from shardwise.runtime.launch import choose_launcher
from shardwise.runtime.poller import cores

T = TypeVar("T")
# Ranks take a moment to start; the bar should not stand still meanwhile.
_START_SECONDS = 6.0


def calibrate(
    output: str | Path | None = None,
    seconds: float = 120.0,
    transports: Sequence[str] | None = None,
    *,
    ranks: int | None = None,
    name: str = "here",
    quiet: bool = False,
) -> Machine:
    """Measure this machine for about `seconds` and return it; write it to `output` if that is given.

    Args:
        output: a TOML file.
        seconds: how long to measure.
        transports: backends to measure; default mpi4py where an MPI launcher is found, and Gloo. The
            first one is what predictions use unless told otherwise.
        ranks: ranks that share this node; default one per core, at least two. Inside `crew` those of the job,
            on one node of it; if it has several nodes, the network between them is measured too.
        name: of the machine.
        quiet: show no progress.
    """
    chosen = tuple(transports) if transports else available_transports()
    # The ranks of a job are as many as they are: they cannot be crowded for a measurement.
    job = is_leader()
    size = max(1 if job else 2, ranks or cores())
    compute = max(1, min(size, cores()))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=quiet, transient=True) as progress:
        share = 0.35 * seconds
        measured_device: tuple[Device, float] = _watched(
            progress, "computing and memory", share, partial(measure_device, compute, share)
        )
        device, input_rate = measured_device
        # More ranks than cores wait differently, so they are measured apart.
        crowds = (size,) if job else (size, 2 * max(size, cores()))
        each = 0.65 * seconds / len(chosen) / len(crowds)
        measured_tiers: list[tuple[Tier, ...]] = [
            _watched(progress, f"messages over {t}, {n} ranks", each, partial(measure_network, t, n, each))
            for t in chosen
            for n in crowds
        ]
    when = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured = f"measured on {when} with {compute} busy ranks"
    machine = Machine(
        name=name,
        device=device,
        node=Node(devices=compute, cores=cores()),
        tiers=tuple(tier for found in measured_tiers for tier in found),
        transport=chosen[0],
        nodes=1,
        description=f"{platform.node()}, {device.name}",
        input_bytes_per_second=input_rate,
        sources={
            "default": measured,
            "input_bytes_per_second": f"{measured}: samples that lie in memory; storage may be slower",
        },
    )
    # Kernels that were measured before belong to the machine as it was then.
    cache_path(device.name, device.threads).unlink(missing_ok=True)
    if output is not None:
        machine.save(output)
    return machine


def available_transports() -> tuple[str, ...]:
    """Return the backends that can be measured here, the default one first."""
    return ("mpi4py", "gloo") if choose_launcher(None) == "mpi" else ("gloo",)


def _watched(progress: Progress, words: str, seconds: float, run: Callable[[], T]) -> T:
    """Run something that takes about `seconds` and let the bar follow the clock."""
    task = progress.add_task(words, total=seconds + _START_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        start = time.monotonic()
        while not future.done():
            progress.update(task, completed=min(seconds + _START_SECONDS, time.monotonic() - start))
            time.sleep(0.1)
        progress.update(task, completed=seconds + _START_SECONDS)
        return future.result()
