"""`shardwise run` and `shardwise doctor`: output, codes, refusals and what is found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shardwise.cli import app
from shardwise.runtime import TransportError, doctor, launch
from shardwise.runtime.cgroup import memory_limits
from shardwise.runtime.doctor import Finding, usable
from shardwise.runtime.mpi import mpiexec
from shardwise.runtime.mpi.mpiexec import Mpiexec
from shardwise.runtime.poller import cores
from shardwise.runtime.relay import Ended

SCRIPT = """
import os, sys
print("rank", os.environ.get("PMI_RANK", os.environ.get("RANK")), "args", sys.argv[1:])
print("to stderr", file=sys.stderr)
print("threads", os.environ["OMP_NUM_THREADS"], __name__)
sys.exit(int(sys.argv[2]))
"""


def run(tmp_path: Path, *options: str, code: str = "0") -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "shardwise.cli", "run", *options, str(script), "--flag", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("launcher", launch.LAUNCHERS)
def test_output_carries_ranks_and_arguments_reach_the_script(
    tmp_path: Path, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = run(tmp_path, "-n", "2", "--launcher", launcher, "--json")
    assert found.returncode == 0, found.stderr
    *lines, last = found.stdout.splitlines()
    for rank in range(2):
        assert f"[{rank}] rank {rank} args ['--flag', '0']" in lines
        assert f"[{rank}] threads {max(1, cores() // 2)} __main__" in lines
        assert f"[{rank}] to stderr" in found.stderr.splitlines()
    assert json.loads(last)["launcher"] == launcher
    assert json.loads(last)["code"] == 0


def test_the_scripts_exit_code_is_the_commands(tmp_path: Path) -> None:
    found = run(tmp_path, "-n", "2", code="5")
    assert found.returncode == 5
    assert "exits with code 5" in found.stderr


def test_a_killed_rank_is_named_though_another_fails_for_its_want_first(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0': sys.exit(1)\n"
        "time.sleep(0.2)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-m", "shardwise.cli", "run", "-n", "2", "--launcher", "torchrun", str(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 128 + signal.SIGKILL
    assert "rank 1 (process" in found.stderr
    assert "was killed by SIGKILL" in found.stderr


def test_a_killed_rank_is_named_though_its_word_comes_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class SlowRelay(launch.Relay):
        def __init__(self, address: str, size: int, on_end: Callable[[Ended], None]) -> None:
            super().__init__(address, size, lambda ended: (time.sleep(0.3), on_end(ended))[1])

    monkeypatch.setattr(launch, "Relay", SlowRelay)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    )
    assert launch.run(launch.Job(2, (str(script),), "torchrun")) == 128 + signal.SIGKILL
    found = capfd.readouterr().err
    assert "rank 1 (process" in found
    assert "was killed by SIGKILL" in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-n", "2", "absent.py"], "absent.py"),
        (["run", "-n", "0", __file__], "ranks: found 0"),
        (["run", "-n", "2", "--launcher", "ssh", __file__], "launcher: found 'ssh'"),
        (["run", "-n", "2", "--backend", "udp", __file__], "backend: found 'udp'; expected one of nccl"),
        (
            ["run", "-n", "2", "--launcher", "torchrun", "--backend", "mpi4py", __file__],
            "needs the launcher 'mpi'",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code != 0
    assert message in str(found.exception)


def test_the_users_threads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("RANK", "3")
    job = launch.Job(2, ("x.py",), "mpi", "gloo")
    made = launch.environment(job, "address")
    assert made["OMP_NUM_THREADS"] == "7"
    assert made["SHARDWISE_BACKEND"] == "gloo"
    assert "RANK" not in made


def test_open_mpi_is_told_that_root_and_oversubscription_are_fine() -> None:
    command, extra = launch.mpi_command(Mpiexec("mpiexec", "Open MPI", "v5", ()), 4)
    assert "--oversubscribe" in command
    assert extra["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert launch.mpi_command(Mpiexec("mpiexec", "MPICH", "v5", ()), 4)[1] == {}


@pytest.mark.parametrize("vendor", ["MPICH", "Intel MPI", "MVAPICH", "Open MPI"])
def test_ranks_stay_on_this_host_inside_an_allocation_of_many(vendor: str) -> None:
    command, extra = launch.mpi_command(Mpiexec("mpiexec", vendor, "v5", ()), 4)
    if vendor == "Open MPI":
        assert command[command.index("--host") + 1] == "localhost:4"
        assert "slurm" in extra["OMPI_MCA_ras"]
    else:
        assert command[command.index("-hosts") + 1] == "localhost"
        assert command[command.index("-launcher") + 1] == "fork"


def test_a_job_runs_on_this_host_whatever_slurm_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOBID": "7",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NODELIST": "absent[1-2]",
        "SLURM_JOB_NODELIST": "absent[1-2]",
        "SLURM_TASKS_PER_NODE": "1(x2)",
        # A name as long as those that some sites give to the folders of a job.
        "TMPDIR": str(tmp_path / ("temporary" * 12)),
    }
    for name, value in allocated.items():
        monkeypatch.setenv(name, value)
    Path(allocated["TMPDIR"]).mkdir()
    found = run(tmp_path, "-n", "2", "--launcher", "mpi")
    assert found.returncode == 0, found.stderr
    assert "[1] rank 1 args ['--flag', '0']" in found.stdout.splitlines()


def test_sockets_lie_where_their_names_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.tempfile, "gettempdir", lambda: "/scratch/job")
    assert launch.short_root() is None
    monkeypatch.setattr(launch.tempfile, "gettempdir", lambda: "/scratch/" + 72 * "j")
    assert launch.short_root() == "/tmp"


def test_doctor_names_what_it_found() -> None:
    found = CliRunner().invoke(app, ["doctor", "--no-ping", "--json"])
    rows = {row["name"]: row for row in json.loads(found.stdout)}
    assert rows["cores"]["value"] == str(cores())
    assert "mpiexec" in rows["MPI"]["value"]
    assert rows["launcher"]["value"] == "mpi"
    assert found.exit_code == 0


@pytest.mark.skipif(doctor.torch.cuda.is_available(), reason="the default with CUDA devices is NCCL")
@pytest.mark.parametrize(("launcher", "backend"), [("mpi", "mpi4py"), ("torchrun", "gloo")])
def test_doctor_tells_what_run_would_use(
    monkeypatch: pytest.MonkeyPatch, launcher: str, backend: str
) -> None:
    monkeypatch.delenv("SHARDWISE_BACKEND", raising=False)
    monkeypatch.setattr(doctor, "choose_launcher", lambda _: launcher)
    rows = {finding.name: finding.value for finding in doctor.examine(ping=False)}
    assert rows["backend"].startswith("gloo (started by python")
    assert rows["backend in run"].startswith(backend)


def test_only_processes_of_the_job_are_ended() -> None:
    address = "socket of this job"
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    mine = subprocess.Popen(sleep, env=os.environ | {launch.ADDRESS: address})
    # What a finished rank's number may belong to by the time the job is cleared away.
    strangers = [subprocess.Popen(sleep, env=os.environ | more) for more in ({}, {launch.ADDRESS: "/other"})]
    job = launch._Run.__new__(launch._Run)
    job._processes, job._address = [], address
    job._relay = SimpleNamespace(pids=dict(enumerate([mine.pid, *(s.pid for s in strangers)])))
    try:
        job._end_all(0.0)
        assert mine.wait(timeout=10) == -signal.SIGKILL
        assert [stranger.poll() for stranger in strangers] == [None, None]
    finally:
        for process in (mine, *strangers):
            process.kill()
            process.wait()
    assert not launch.is_rank(mine.pid, address)


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/\n", {"memory.max": "max\n"}, []),
        ("0::/\n", {"memory.max": "1024\n"}, [1024]),
        ("0::/job/step\n", {"job/step/memory.max": "max\n", "job/memory.max": "4096\n"}, [4096]),
        (
            "5:cpu:/x\n4:memory:/job\n1:name=systemd:/x\n",
            {
                "memory/job/memory.limit_in_bytes": "512\n",
                "memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
            },
            [512, 2**63 - 4096],
        ),
        ("nonsense without colons", {}, None),
    ],
)
def test_memory_is_what_the_control_groups_allow(
    tmp_path: Path, own: str, files: dict[str, str], limits: list[int] | None
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert memory_limits(tmp_path / "own", tmp_path / "root") == (limits or [])
    assert memory_limits(tmp_path / "absent", tmp_path / "root") == []


def test_doctor_tells_the_memory_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_limits", lambda: [3 << 20, 2 << 20])
    assert doctor.memory_bytes() == 2 << 20
    monkeypatch.setattr(doctor, "memory_limits", list)
    assert doctor.memory_bytes() > 2 << 20


def test_doctor_pings_nccl_where_two_devices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor.dist, "is_nccl_available", lambda: True)
    assert doctor._pingable() == ["mpi4py", "gloo", "nccl"]
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 1)
    assert doctor._pingable() == ["mpi4py", "gloo"]


def test_an_mpi_that_cannot_be_used_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> Mpiexec:
        raise TransportError("MPI: mpi4py loaded Open MPI, but no mpiexec of it was found")

    monkeypatch.setattr(launch, "find_mpiexec", mismatch)
    said: list[str] = []
    assert launch.choose_launcher(None, said.append) == "torchrun"
    assert len(said) == 1
    assert "no mpiexec of it was found" in said[0]
    assert "torchrun" in said[0]
    assert launch.choose_launcher("mpi", said.append) == "mpi"
    monkeypatch.setattr(launch.library, "installed", lambda: False)
    assert launch.choose_launcher(None, said.append) == "torchrun"
    assert len(said) == 1


def test_a_machine_with_gloo_alone_is_healthy() -> None:
    mismatch, ping = Finding("MPI", "no mpiexec", ok=False), Finding("ping gloo", "round trip 90 us")
    assert usable([mismatch])
    assert usable([mismatch, ping])
    assert not usable([mismatch, Finding("ping gloo", "failed with code 1", ok=False)])


def test_a_launcher_that_does_not_answer_belongs_to_nobody(tmp_path: Path) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text("no program")
    broken.chmod(0o755)
    assert mpiexec._launcher_vendor(str(broken)) == "none that answers"


@pytest.mark.full
def test_doctor_lets_two_ranks_talk_on_each_backend() -> None:
    found = CliRunner().invoke(app, ["doctor", "--json"])
    pings = [row for row in json.loads(found.stdout) if row["name"].startswith("ping")]
    assert [row["name"] for row in pings] == ["ping mpi4py", "ping gloo"]
    assert all("round trip" in row["value"] for row in pings)
