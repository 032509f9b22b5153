"""Load MPI once, with full thread support, and know where the loaded library lives."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from functools import cache
from types import ModuleType
from typing import Any

from shardwise.runtime.environment import Place
from shardwise.runtime.errors import TransportError


def installed() -> bool:
    """Return whether mpi4py can be imported, without starting MPI."""
    return importlib.util.find_spec("mpi4py") is not None


@cache
def load() -> Any:
    """Import mpi4py's MPI, which initialises it; MPI is finalised when the interpreter ends."""
    if not installed():
        raise TransportError("backend 'mpi4py': mpi4py is not installed; `pip install shardwise[mpi-local]`")
    import mpi4py

    mpi4py.rc(initialize=True, threads=True, thread_level="multiple", finalize=True)
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def loaded() -> bool:
    """Return whether MPI was started and not yet finalised in this process."""
    if load.cache_info().currsize == 0:
        return False
    mpi = load()
    return bool(mpi.Is_initialized() and not mpi.Is_finalized())


def threaded() -> bool:
    """Return whether several threads may call this MPI at once."""
    mpi = load()
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def check_world(place: Place) -> None:
    """Refuse a world that differs from the launcher's: then another MPI's mpiexec was used."""
    world = load().COMM_WORLD
    if (world.Get_rank(), world.Get_size()) == (place.rank, place.size):
        return
    raise TransportError(
        f"MPI world: the launcher ({place.launcher}) says rank {place.rank} of {place.size}, but the MPI "
        f"library that mpi4py loaded says rank {world.Get_rank()} of {world.Get_size()}. The launcher and "
        f"the library ({vendor(load().Get_library_version())}) belong to different MPI installations; "
        "`shardwise run -n N script.py` picks the launcher that belongs to the library."
    )


def vendor(version: str) -> str:
    """Return the short name of an MPI from its version text."""
    for name, pattern in (
        ("Open MPI", r"Open\s?MPI|OpenRTE|\bprte"),
        ("Intel MPI", r"Intel\(R\) MPI"),
        ("MVAPICH", r"MVAPICH"),
        ("MPICH", r"MPICH|HYDRA"),
    ):
        if re.search(pattern, version, re.IGNORECASE):
            return name
    return version.strip().split("\n")[0][:40] or "unknown"


def library_paths() -> list[str]:
    """Return the files of the MPI library that is mapped into this process."""
    paths: list[str] = []
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                path = line.split(maxsplit=5)[-1].strip()
                if re.match(r"libmpi[^/]*\.so", os.path.basename(path)) and path not in paths:
                    paths.append(path)
    except FileNotFoundError:
        return []
    return paths


@cache
def cuda_aware() -> bool:
    """Return whether this MPI takes device pointers; `SHARDWISE_MPI_CUDA=0/1` overrides its word."""
    said = os.environ.get("SHARDWISE_MPI_CUDA")
    if said is not None:
        return said == "1"
    if os.environ.get("MV2_USE_CUDA") == "1" or os.environ.get("MVP_USE_CUDA") == "1":
        return True
    module: ModuleType = load()
    try:
        query = ctypes.CDLL(module.__file__).MPIX_Query_cuda_support
    except AttributeError:
        return False
    return bool(query())
