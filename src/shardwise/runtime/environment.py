"""Find out who this process is: rank, size and launcher, from the environment alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Say which rank of how many this process is, on this node and in the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    speaks_mpi: bool
    guessed: bool = False  # the launcher did not say which ranks share a node


BACKENDS = ("nccl", "gloo", "mpi4py")

ALONE = Place(rank=0, size=1, local_rank=0, local_size=1, launcher="python", speaks_mpi=False)


@dataclass(frozen=True)
class _Launcher:
    """Name the variables a launcher sets; `marker` tells it from others that set the same ones."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    speaks_mpi: bool
    marker: str | None = None


# Order matters: torchrun inside a Slurm step must win over srun, and an mpiexec that started its
# proxies through srun must win over the Slurm variables those proxies inherited.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", False),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        True,
    ),
    _Launcher(
        "MVAPICH",
        "MVP_COMM_WORLD_RANK",
        "MVP_COMM_WORLD_SIZE",
        "MVP_COMM_WORLD_LOCAL_RANK",
        "MVP_COMM_WORLD_LOCAL_SIZE",
        True,
    ),
    _Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        True,
    ),
    _Launcher(
        "Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", True, "I_MPI_MPIRUN"
    ),
    _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", True, "MPI_LOCALRANKID"),
)


# What launchers tell a rank about itself and its job. Slurm's stay: they say where ranks may be started.
_OF_A_RANK = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_(RANK|NAME|WORLD_SIZE)|"
    r"MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|(OMPI|MVP|MV2)_COMM_WORLD_.*|"
    r"PMI_(RANK|SIZE|FD|PORT|ID|SPAWNED)|PMIX_(RANK|NAMESPACE|SERVER_.*)|MPI_LOCALN?RANK.*|I_MPI_MPIRUN"
)


def check_backend(name: str) -> None:
    """Refuse a backend that there is not."""
    if name not in BACKENDS:
        raise ValueError(f"backend: found {name!r}; expected one of {', '.join(BACKENDS)}")


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a job of its own, even if this process is a rank of another one."""
    return {name: value for name, value in environ.items() if not _OF_A_RANK.fullmatch(name)}


def detect(environ: Mapping[str, str] = os.environ) -> Place:
    """Return this process's place in the job, or a world of one under a plain `python`."""
    for launcher in _LAUNCHERS:
        if launcher.rank not in environ or launcher.size not in environ:
            continue
        if launcher.marker is not None and launcher.marker not in environ:
            continue
        return _place(launcher, environ)
    # sbatch sets SLURM_PROCID in the batch script too; only srun sets a step.
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return _slurm(environ)
    if "PMI_RANK" in environ and "PMI_SIZE" in environ:
        rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
        return Place(rank, size, rank, size, "MPICH", True, guessed=True)
    return ALONE


def _place(launcher: _Launcher, environ: Mapping[str, str]) -> Place:
    rank, size = _number(environ, launcher.rank), _number(environ, launcher.size)
    # A hand-made RANK/WORLD_SIZE environment means one node until the ranks have met.
    guessed = launcher.local_rank not in environ or launcher.local_size not in environ
    local_rank = rank if guessed else _number(environ, launcher.local_rank)
    local_size = size if guessed else _number(environ, launcher.local_size)
    return Place(rank, size, local_rank, local_size, launcher.name, launcher.speaks_mpi, guessed)


def _slurm(environ: Mapping[str, str]) -> Place:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, size_name)
    local_rank = _number(environ, "SLURM_LOCALID") if "SLURM_LOCALID" in environ else rank
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(size)
    node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
    speaks_mpi = "PMI_RANK" in environ or "PMIX_RANK" in environ
    return Place(rank, size, local_rank, tasks_per_node(tasks)[node], "srun", speaks_mpi)


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's `4(x2),3` into one count per node."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"tasks per node: cannot read {text!r}; expected a form such as '4(x2),3'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list such as `gpu[003-010,12],login1` or `r1i[0-1]n[2-3]`."""
    match = re.match(r"((?:[^\[\],]|\[\w[^\[\]]*\])+)(?:,|$)", nodelist.strip())
    if match is None:
        raise ValueError(f"node list: cannot read {nodelist!r}; expected a form such as 'node[01-04]'")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[1])


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name}: found {text!r}; expected an integer") from None
