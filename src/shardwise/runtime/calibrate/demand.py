"""Profile on demand: measure the layer shapes of a program on this machine, and keep them for next time."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.graph import Graph
from shardwise.machine import Machine
from shardwise.oracle.kernels import KernelTimes, Roofline, Task
from shardwise.oracle.predict import Oracle
from shardwise.oracle.profile import Profile, cache_path
from shardwise.plan import Plan
from shardwise.program import Regrid
from shardwise.runtime.calibrate.device import device_name
from shardwise.runtime.calibrate.kernels import profile_kernels


def is_here(machine: Machine) -> bool:
    """Tell whether a machine is the one we run on, so that its kernels can be measured."""
    return machine.device.name == device_name()


def load_profile(machine: Machine) -> Profile:
    """Return what is known about the kernels of a machine's device."""
    device = machine.device
    path = cache_path(device.name, device.threads)
    return Profile.load(path, device.name, device.threads, Roofline(device))


def tasks_of(graph: Graph, machine: Machine, plans: Iterable[Plan], batch: int) -> list[Task]:
    """Return every computation of some plans, once per stage, rank and size of micro-batch."""
    oracle = Oracle(graph, machine)
    found: list[Task] = []
    seen: set[int] = set()
    for plan in plans:
        step = oracle.lowered(plan, batch)
        sizes: dict[tuple[int, int], int] = {}
        for m in range(step.program.micro_batches):
            lo, hi = step.samples(0, m)
            for stage in range(step.program.stages):
                sizes.setdefault((stage, hi - lo), m)
        for (stage, _), m in sizes.items():
            program = oracle.stage(step, stage, 0, m)
            if id(program) in seen:
                continue
            seen.add(id(program))
            for op in program.ops:
                if not isinstance(op, Regrid):
                    found += [Task.of(op, rank) for rank in range(program.width)]
    return found


def kernels_for_plans(
    graph: Graph, machine: Machine, plans: Iterable[Plan], batch: int, seconds: float
) -> KernelTimes | None:
    """Return kernel times for some plans: a profile where the machine is this one, else None.

    Args:
        graph: the network.
        machine: what is asked about.
        plans: whose computations are needed.
        batch: samples of the mini-batch.
        seconds: budget for measuring what the profile lacks; 0 measures nothing.
    """
    if not is_here(machine):
        return None
    profile = load_profile(machine)
    if seconds > 0:
        tasks = tasks_of(graph, machine, plans, batch)
        if profile.missing(tasks):
            profile_kernels(profile, tasks, seconds=seconds, ranks=machine.node.devices)
            profile.save(cache_path(machine.device.name, machine.device.threads))
    return profile if profile.entries else None
