"""Look at this machine: versions, cores, memory, MPI, and whether two ranks can talk."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata

import torch
import torch.distributed as dist

from shardwise.runtime import mpi
from shardwise.runtime.cgroup import memory_limits
from shardwise.runtime.environment import ALONE, detect
from shardwise.runtime.errors import TransportError
from shardwise.runtime.launch import choose_launcher
from shardwise.runtime.mpi import library
from shardwise.runtime.mpi.mpiexec import find_mpiexec
from shardwise.runtime.poller import cores
from shardwise.runtime.session import choose_backend

_PING_SECONDS = 60


@dataclass(frozen=True)
class Finding:
    """Hold one line of the report; `ok` is False for what needs attention."""

    name: str
    value: str
    ok: bool = True


def examine(ping: bool = True) -> list[Finding]:
    """Return everything that matters for running ranks here."""
    findings = [
        Finding("shardwise", _version("shardwise")),
        Finding("python", platform.python_version()),
        Finding("torch", torch.__version__),
        Finding("mpi4py", _version("mpi4py")),
        Finding("cores", str(cores())),
        Finding("memory", f"{memory_bytes() / 2**30:.1f} GiB"),
        Finding("devices", _devices()),
        _mpi(),
        Finding("launcher", choose_launcher(None)),
        Finding("backend", _backend()),
        Finding("backend in run", _backend_in_run()),
    ]
    if ping:
        findings += [_ping(name) for name in _pingable()]
    return findings


def usable(findings: Sequence[Finding]) -> bool:
    """Return whether ranks can talk here: whichever backends were tried, or could be."""
    pings = [finding for finding in findings if finding.name.startswith("ping")]
    if pings:
        return all(finding.ok for finding in pings)
    return dist.is_gloo_available() or all(finding.ok for finding in findings)


def memory_bytes() -> int:
    """Return the memory that processes here may use: that of the node, or what their container is given."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits()])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ", ".join(torch.cuda.get_device_name(index) for index in range(count)) or "CPU only"


def _mpi() -> Finding:
    if not library.installed():
        return Finding("MPI", "not installed; `pip install shardwise[mpi-local]` brings it")
    try:
        found = find_mpiexec()
    except TransportError as error:
        return Finding("MPI", str(error), ok=False)
    version = " ".join(found.library_version.splitlines()[0].split())
    return Finding("MPI", f"{version}; launcher {found.path}")


def _backend() -> str:
    place = detect()
    chosen = choose_backend(None, place)
    return f"{chosen} (started by {place.launcher}, {place.size} rank{'s' * (place.size > 1)})"


def _backend_in_run() -> str:
    """Return what ranks that `shardwise run` starts here would choose."""
    launcher = choose_launcher(None)
    place = replace(ALONE, size=2, local_size=2, launcher=launcher, speaks_mpi=launcher == "mpi")
    return f"{choose_backend(None, place)} (`shardwise run` starts ranks by {launcher})"


def _pingable() -> list[str]:
    # Two ranks of NCCL need a device each.
    nccl = ["nccl"] if torch.cuda.device_count() > 1 and dist.is_nccl_available() else []
    return ([mpi.BACKEND] if choose_launcher(None) == "mpi" else []) + ["gloo"] + nccl


def _ping(backend: str) -> Finding:
    """Start two ranks and measure a round trip."""
    launcher = "mpi" if backend == mpi.BACKEND else "torchrun"
    options = ["-n", "2", "--launcher", launcher, "--backend", backend]
    command = [sys.executable, "-m", "shardwise.cli", "run", *options, "-m", "shardwise.runtime.ping"]
    name = f"ping {backend}"
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_PING_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, f"two ranks did not answer within {_PING_SECONDS} s", ok=False)
    lines = [line for line in child.stdout.splitlines() if "round trip" in line]
    if child.returncode or not lines:
        reason = (child.stderr.strip().splitlines() or ["no output"])[-1]
        return Finding(name, f"failed with code {child.returncode}: {reason}", ok=False)
    return Finding(name, lines[0].partition("] ")[2])
