"""Find the machine that a job runs on: what the user says, a file, what was measured before, or measure."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

from shardwise.machine import Machine
from shardwise.oracle.profile import cache_folder
from shardwise.runtime.calibrate.device import device_name
from shardwise.runtime.calibrate.machine import calibrate
from shardwise.runtime.session import Session

MACHINE_FILE = "here.toml"


def machine_path(session: Session) -> Path:
    """Return where the machine of a job is kept: one file per device, ranks of a node, and transport."""
    place = session.place
    # The last word is new since a job on several nodes measures the network between them.
    words = f"{device_name()}/{place.size}/{place.local_size}/{session.threads}/{session.backend}/tiers"
    digest = hashlib.sha256(words.encode()).hexdigest()[:12]
    return cache_folder() / f"machine-{digest}.toml"


def known_machine(session: Session, given: Machine | str | Path | None = None) -> tuple[Machine, str] | None:
    """Return the machine of a job and how it is known, without measuring; None if it is not known.

    Args:
        session: the job.
        given: a machine, a preset's name or a file; default `SHARDWISE_MACHINE`, then `here.toml` in the
            working directory if that is of this device, then what an earlier job measured.
    """
    told = given if given is not None else os.environ.get("SHARDWISE_MACHINE")
    if told is not None:
        machine = Machine.load(told)
        return _over(machine, session), machine.name if isinstance(told, Machine) else str(told)
    for path in (Path(MACHINE_FILE), machine_path(session)):
        if path.is_file():
            machine = Machine.load(path)
            if machine.device.name == device_name():
                return _over(machine, session), str(path)
    return None


def measured_machine(session: Session, seconds: float, quiet: bool = False) -> Machine:
    """Measure the machine with the ranks of this job (inside `crew`), and keep it for the next one."""
    place = session.place
    found = calibrate(None, seconds, (session.backend,), ranks=place.local_size, quiet=quiet)
    machine = found.replace(nodes=math.ceil(place.size / max(1, place.local_size)))
    path = machine_path(session)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.stem}.{os.getpid()}.toml")
    machine.save(scratch)
    scratch.replace(path)
    return machine


def _over(machine: Machine, session: Session) -> Machine:
    """Take the network figures of the transport that the job uses, where the machine has them."""
    known = {tier.transport for tier in machine.tiers}
    return machine.with_transport(session.backend) if session.backend in known else machine
