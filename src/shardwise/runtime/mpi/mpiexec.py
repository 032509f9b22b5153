"""Find the launcher that belongs to the MPI library mpi4py loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache

from shardwise.runtime.errors import TransportError
from shardwise.runtime.mpi.library import installed, vendor

# Runs in a child, because importing MPI for its version must not tie this process to a library.
_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
from shardwise.runtime.mpi.library import library_paths
print(json.dumps({"version": MPI.Get_library_version(), "paths": library_paths()}))
"""


@dataclass(frozen=True)
class Mpiexec:
    """Hold a launcher and the library it belongs to."""

    path: str
    vendor: str
    library_version: str
    library_paths: tuple[str, ...]


@cache
def probe_library() -> tuple[str, tuple[str, ...]]:
    """Return the version text and the files of the MPI that mpi4py loads."""
    if not installed():
        raise TransportError("MPI: mpi4py is not installed; `pip install shardwise[mpi-local]` brings both")
    child = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if child.returncode:
        reason = child.stderr.strip().splitlines()[-1:] or ["no message"]
        raise TransportError(f"MPI: mpi4py is installed but cannot load an MPI library: {reason[0]}")
    found = json.loads(child.stdout)
    return str(found["version"]).strip("\0\n "), tuple(found["paths"])


@cache
def find_mpiexec() -> Mpiexec:
    """Return the launcher beside the loaded library, or one on PATH from the same vendor."""
    version, paths = probe_library()
    name = vendor(version)
    seen: list[str] = []
    for candidate in _candidates(paths):
        if candidate in seen or not os.access(candidate, os.X_OK):
            continue
        seen.append(candidate)
        if _launcher_vendor(candidate) == _launcher_of(name):
            return Mpiexec(candidate, name, version, paths)
    raise TransportError(
        f"MPI: mpi4py loaded {name} from {', '.join(paths) or 'an unknown place'}, but no mpiexec of it was "
        f"found (looked at {', '.join(seen) or 'nothing on PATH'}); an mpiexec of another MPI would start "
        "separate worlds of one rank each"
    )


def _candidates(paths: tuple[str, ...]) -> list[str]:
    names = ("mpiexec", "mpirun", "mpiexec.hydra")
    folders = [os.path.join(os.path.dirname(os.path.dirname(path)), "bin") for path in paths]
    beside = [os.path.join(folder, name) for folder in folders for name in names]
    return beside + [path for name in names if (path := shutil.which(name)) is not None]


def _launcher_of(library: str) -> str:
    """Return the vendor word a library's launcher prints: MVAPICH uses MPICH's."""
    return "MPICH" if library == "MVAPICH" else library


def _launcher_vendor(path: str) -> str:
    try:
        child = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "none that answers"
    return _launcher_of(vendor(child.stdout + child.stderr))
