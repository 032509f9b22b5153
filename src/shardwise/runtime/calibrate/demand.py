"""Profile on demand: measure the layer shapes of a program on this machine, and keep them for next time."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.graph import Graph
from shardwise.machine import Machine
from shardwise.oracle.kernels import Roofline
from shardwise.oracle.predict import Oracle
from shardwise.oracle.profile import Profile, cache_path
from shardwise.plan import Plan
from shardwise.program import StageProgram
from shardwise.runtime.calibrate.device import device_name
from shardwise.runtime.calibrate.kernels import profile_kernels
from shardwise.runtime.calibrate.machine import available_transports


def is_here(machine: Machine) -> bool:
    """Tell whether a machine is the one we run on, so that its kernels can be measured."""
    return machine.device.name == device_name()


def load_profile(machine: Machine) -> Profile:
    """Return what is known about the kernels of a machine's device."""
    device = machine.device
    path = cache_path(device.name, device.threads)
    return Profile.load(path, device.name, device.threads, Roofline(device))


def stages_of(graph: Graph, machine: Machine, plans: Iterable[Plan], batch: int) -> list[StageProgram]:
    """Return every lowered stage of some plans, once per size of micro-batch."""
    oracle = Oracle(graph, machine)
    found: dict[int, StageProgram] = {}
    for plan in plans:
        step = oracle.lowered(plan, batch)
        sizes: dict[tuple[int, int], int] = {}
        for m in range(step.program.micro_batches):
            lo, hi = step.samples(0, m)
            for stage in range(step.program.stages):
                sizes.setdefault((stage, hi - lo), m)
        for (stage, _), m in sizes.items():
            program = oracle.stage(step, stage, 0, m)
            found[id(program)] = program
    return list(found.values())


def empty_profile(machine: Machine) -> Profile:
    """Return a profile of a machine's device without any measurement."""
    device = machine.device
    return Profile(device.name, device.threads, Roofline(device))


def complete(
    profile: Profile, graph: Graph, machine: Machine, plans: Iterable[Plan], batch: int, seconds: float
) -> bool:
    """Measure what a profile lacks of some plans, in a crowd where they run so; tell if that was any."""
    oracle, before = Oracle(graph, machine), dict(profile.entries)
    groups: dict[bool, list[Plan]] = {True: [], False: []}
    for plan in plans:
        groups[oracle.crowded(plan).crowded].append(plan)
    total = sum(map(len, groups.values()))
    for crowded, mine in groups.items():
        if mine:
            profile_kernels(
                profile,
                stages_of(graph, machine, mine, batch),
                seconds=seconds * len(mine) / total,
                ranks=machine.node.devices,
                crowd=max(oracle.crowded(plan).crowd for plan in mine) if crowded else 0,
                transport=machine.transport if machine.transport in available_transports() else "gloo",
            )
    return profile.entries != before


def fresh_profile(
    graph: Graph, machine: Machine, plans: Iterable[Plan], batch: int, seconds: float
) -> Profile:
    """Measure the computations of some plans now, whatever was measured before, and keep nothing."""
    profile = empty_profile(machine)
    complete(profile, graph, machine, plans, batch, seconds)
    return profile
