"""Who am I: the variables every launcher sets lead to the right place."""

from __future__ import annotations

import pytest

from shardwise.runtime.environment import ALONE, Place, detect, first_host, tasks_per_node, without_place
from shardwise.runtime.neighbours import neighbours, threads_of
from shardwise.runtime.rendezvous import step_port

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def place(launcher: str, speaks_mpi: bool) -> Place:
    return Place(5, 8, 1, 4, launcher, speaks_mpi)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ALONE),
        (TORCHRUN, place("torchrun", False)),
        (OPEN_MPI, place("Open MPI", True)),
        ({k.replace("OMPI", "MV2"): v for k, v in OPEN_MPI.items()}, place("MVAPICH", True)),
        ({k.replace("OMPI", "MVP"): v for k, v in OPEN_MPI.items()}, place("MVAPICH", True)),
        (HYDRA, place("MPICH", True)),
        (HYDRA | {"I_MPI_MPIRUN": "mpirun"}, place("Intel MPI", True)),
        (SRUN, place("srun", False)),
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, place("srun", True)),
        (SRUN | {"PMIX_RANK": "5"}, place("srun", True)),
        # torchrun in a Slurm step: the step has one task per node, torchrun knows better.
        (SRUN | {"SLURM_NTASKS": "2"} | TORCHRUN, place("torchrun", False)),
        # hydra started its proxies with srun: their task numbers are not ranks.
        (SRUN | {"SLURM_PROCID": "1"} | HYDRA, place("MPICH", True)),
        # A batch script is no task, although sbatch gives it a task number.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ALONE),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Place(1, 2, 1, 2, "MPICH", True, guessed=True)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, 1, 2, "torchrun", False, guessed=True)),
    ],
)
def test_place_is_read_from_each_launchers_variables(environ: dict[str, str], expected: Place) -> None:
    assert detect(environ) == expected


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match=r"RANK: found 'first'"):
        detect({"RANK": "first", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("outer", [TORCHRUN, OPEN_MPI, HYDRA])
def test_a_job_inside_a_job_forgets_the_outer_ones_place(outer: dict[str, str]) -> None:
    kept = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "7",
        "PMIX_MCA_gds": "hash",
        "OMPI_MCA_btl": "self",
        "MY_RANK": "3",
    }
    told = {"MASTER_ADDR": "x", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "y", "PMI_FD": "5"}
    assert without_place(outer | told | kept) == kept


def test_ranks_bound_to_cores_of_their_own_do_not_crowd_a_node() -> None:
    place = Place(2, 4, 0, 2, "x", False)
    bound = ["1 a", "2 a", "4 b", "8 b"]
    assert neighbours(place, bound) == (place, 2)
    assert neighbours(place, ["3 a", "3 a", "3 b", "3 b"])[1] == 2
    assert neighbours(place, ["f a", "f a", "1 b", "1 b"])[1] == 1
    assert [threads_of(*case) for case in ((1, 2, 2), (4, 16, 4), (8, 16, 4), (16, 16, 4), (1, 1, 4))] == [
        1, 4, 4, 4, 1
    ]  # fmt: skip


def test_ranks_that_were_not_told_who_shares_their_node_find_out() -> None:
    guessed = Place(3, 4, 3, 4, "MPICH", True, guessed=True)
    assert neighbours(guessed, ["f a", "f b", "f a", "f b"])[0] == Place(3, 4, 1, 2, "MPICH", True)


def test_slurm_counts_and_hosts_are_expanded() -> None:
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    assert first_host("gpu[003-010,12],login1") == "gpu003"
    assert first_host("alone") == "alone"
    assert first_host("a,b") == "a"
    assert first_host("r1i[0-1]n[2-3],login1") == "r1i0n2"
    with pytest.raises(ValueError, match="tasks per node"):
        tasks_per_node("many")
    with pytest.raises(ValueError, match=r"node list: cannot read 'gpu\['"):
        first_host("gpu[")


def test_steps_of_one_job_meet_at_ports_of_their_own() -> None:
    steps = [(job, step) for job in range(7000, 7100) for step in range(100)]
    ports = {step_port({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) for job, step in steps}
    assert len(ports) == len(steps)
    assert min(ports) >= 20000
    assert max(ports) < 32768
