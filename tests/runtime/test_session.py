"""Joining a job: backend, device, threads and timeout are chosen, and refused by name."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import shardwise.runtime as runtime
from ranks import run_ranks
from shardwise.geometry import whole
from shardwise.runtime import rendezvous, session
from shardwise.runtime.differentiable import _halves, regrid
from shardwise.runtime.environment import ALONE, Place
from shardwise.runtime.mpi import library, registration
from shardwise.runtime.mpi.mpiexec import find_mpiexec
from shardwise.runtime.session import _hang_bell, choose_backend
from shardwise.runtime.wire import Parcel, wire_of

MPI = Place(0, 2, 0, 2, "MPICH", True)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHARDWISE_BACKEND", "SHARDWISE_TIMEOUT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_plain_python_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_TIMEOUT", "30")
    session = runtime.init(backend="gloo")
    try:
        assert (session.rank, session.size, session.backend) == (0, 1, "gloo")
        assert session.timeout_seconds == 30.0
        assert runtime.init() is session
        assert runtime.current() is session
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
        with pytest.raises(runtime.TransportError, match="already joined with 'gloo'"):
            runtime.init(backend="mpi4py")
    finally:
        runtime.finalize()
    assert not dist.is_initialized()
    runtime.finalize()
    with pytest.raises(runtime.TransportError, match="init"):
        runtime.current()


@pytest.mark.parametrize("named", [True, False])
def test_a_process_group_that_exists_is_asked_for_its_backend(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    monkeypatch.setenv("SHARDWISE_BACKEND", "mpi4py")
    dist.init_process_group("gloo" if named else None, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(runtime.TransportError, match="already has a process group over 'gloo'"):
            runtime.init(backend="mpi4py")
        assert runtime.init().backend == "gloo"
        runtime.finalize()
        assert dist.is_initialized()
    finally:
        runtime.finalize()
        dist.destroy_process_group()


def test_what_was_prepared_for_one_job_is_not_used_in_the_next() -> None:
    for _ in range(2):
        runtime.init(backend="gloo")
        layout = whole((2, 3), 1)
        assert regrid(torch.ones(2, 3), layout, layout).sum() == 6
        assert _halves.cache_info().currsize == 1
        runtime.finalize()
        assert _halves.cache_info().currsize == 0


def test_without_memory_to_share_there_is_no_bell() -> None:
    store = dist.HashStore()
    store.set(f"bells/{socket.gethostname()}", "/proc/0/fd/0")
    assert _hang_bell(store, Place(1, 2, 1, 2, "x", True)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default with CUDA devices is NCCL")
def test_the_default_backend_follows_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend(None, ALONE) == "gloo"
    assert choose_backend(None, MPI) == "mpi4py"
    assert choose_backend("gloo", MPI) == "gloo"
    monkeypatch.setenv("SHARDWISE_BACKEND", "gloo")
    assert choose_backend(None, MPI) == "gloo"
    with pytest.raises(ValueError, match="nccl"):
        choose_backend("nccl", ALONE)
    with pytest.raises(ValueError, match="'udp'"):
        choose_backend("udp", ALONE)


def test_a_useless_timeout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="timeout: found 0"):
        runtime.init(timeout=timedelta(0))
    monkeypatch.setenv("SHARDWISE_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="SHARDWISE_TIMEOUT: found 'soon'"):
        runtime.init()


def who() -> tuple[int, int, str, int, str]:
    session = runtime.current()
    return session.rank, session.size, session.backend, session.threads, session.device.type


@pytest.mark.parametrize("transport", ["gloo", "mpi4py"])
def test_ranks_know_their_place_on_both_transports(transport: str) -> None:
    kind = "cuda" if torch.cuda.is_available() and transport == "mpi4py" else "cpu"
    assert run_ranks(who, 2, transport) == [(rank, 2, transport, 1, kind) for rank in range(2)]


def test_a_launcher_of_another_mpi_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    class World:
        Get_rank = staticmethod(lambda: 0)
        Get_size = staticmethod(lambda: 1)

    class Fake:
        COMM_WORLD = World
        Get_library_version = staticmethod(lambda: "MPICH Version: 5")

    monkeypatch.setattr(library, "load", lambda: Fake)
    with pytest.raises(runtime.TransportError, match=r"rank 0 of 1.*different MPI installations"):
        library.check_world(Place(1, 4, 1, 4, "Open MPI", True))


@pytest.mark.parametrize(
    ("backend", "environ", "way"),
    [
        ("gloo", {"MASTER_ADDR": "a", "MASTER_PORT": "7", "SLURM_STEP_NODELIST": "b[1-2]"}, "a 7"),
        ("nccl", {"SLURM_STEP_NODELIST": "b[1-2]", "SLURM_JOB_ID": "0", "SLURM_STEP_ID": "3"}, "b1 20003"),
        ("gloo", {}, "MPI"),
        ("mpi4py", {"MASTER_ADDR": "a", "MASTER_PORT": "7"}, "MPI"),
    ],
)
def test_only_the_backend_of_mpi_needs_mpi_to_meet(
    monkeypatch: pytest.MonkeyPatch, backend: str, environ: dict[str, str], way: str
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def another_mpi(_: Place) -> None:
        raise runtime.TransportError("belong to different MPI installations")

    met: list[str] = []
    monkeypatch.setattr(library, "check_world", another_mpi)
    monkeypatch.setattr(
        rendezvous, "TCPStore", lambda host, port, *_: met.append(f"{host} {port}") or dist.HashStore()
    )
    place = Place(1, 2, 1, 2, "srun", True)
    if way == "MPI":
        with pytest.raises(runtime.TransportError, match="different MPI"):
            rendezvous.open_store(place, backend)
    else:
        rendezvous.open_store(place, backend)
        assert met == [way]


def test_ranks_that_no_launcher_knows_get_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    for rank, host in enumerate(["elsewhere", socket.gethostname()]):
        dist.PrefixStore("shardwise", store).set(f"place/{rank}", f"3 {host}")
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    place, _ = session._meet_in_group(ALONE)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (2, 3, 1, 2)
    told = Place(2, 3, 0, 1, "torchrun", False)
    assert session._meet_in_group(told)[0] == told
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert session._choose_device("nccl", place) == torch.device("cuda", 1)


def late(transport: str) -> list[float]:
    """Let the other rank wait longer than the limit of an operation, in every way the runtime waits."""
    rank, limit = dist.get_rank(), timedelta(seconds=0.5)
    registration.default_pg_timeout = limit
    if rank == 1:
        time.sleep(0.8)
    group = dist.new_group([0, 1], timeout=limit) if transport == "mpi4py" else dist.group.WORLD
    wire = wire_of(group, range(2))
    set_limit = group.set_timeout if transport == "mpi4py" else dist.distributed_c10d._set_pg_timeout
    set_limit(limit)
    found = []
    try:
        for act in (wire.receive, wire.send) if rank == 0 else (wire.send, wire.receive):
            if rank == 1:
                time.sleep(0.8)
            tensor = torch.full((1 << 18,), float(rank))
            act(Parcel(1 - rank, tensor), 5, "late").wait()
            found.append(tensor[0].item())
        if rank == 1:
            time.sleep(0.8)
        total = torch.full((2,), rank + 1.0)
        wire.all_reduce(total)
        found.append(total[0].item())
        if rank == 1:
            time.sleep(0.8)
        session._barrier()
    finally:
        set_limit(timedelta(minutes=30))
        registration.default_pg_timeout = timedelta(minutes=30)
    return found


@pytest.mark.parametrize("transport", ["gloo", "mpi4py"])
def test_the_runtime_waits_for_a_peer_as_long_as_it_is_alive(transport: str) -> None:
    assert run_ranks(late, 2, transport, (transport,)) == [[1.0, 0.0, 3.0], [1.0, 0.0, 3.0]]


def test_a_longer_timeout_is_the_limit_of_what_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session._limit("nccl", 7200.0) == timedelta(hours=2)
    assert session._limit("nccl", 120.0) == session._limit("gloo", 7200.0) == timedelta(minutes=30)
    monkeypatch.setenv("MASTER_ADDR", "a")
    monkeypatch.setenv("MASTER_PORT", "7")
    limits: list[timedelta] = []
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *given: limits.append(given[-1]) or dist.HashStore())
    for seconds in (2.0, 900.0):
        rendezvous.open_store(Place(1, 2, 1, 2, "torchrun", False), "gloo", seconds)
    assert limits == [timedelta(seconds=300), timedelta(seconds=900)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mpiexec (OpenRTE) 4.1.2", "Open MPI"),
        ("Open MPI v5.0.3, package: x", "Open MPI"),
        ("HYDRA build details:\n    Version: 4.2", "MPICH"),
        ("MVAPICH2 Version: 2.3.7", "MVAPICH"),
        ("Intel(R) MPI Library 2021.11 for Linux", "Intel MPI"),
    ],
)
def test_vendors_are_told_apart(text: str, name: str) -> None:
    assert library.vendor(text) == name


def test_the_launcher_found_belongs_to_the_loaded_library() -> None:
    found = find_mpiexec()
    assert found.vendor == library.vendor(found.library_version)
    assert found.path.endswith(("mpiexec", "mpirun", "mpiexec.hydra"))
