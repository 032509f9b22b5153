"""One rank fails, dies, sleeps or only takes long: the job ends readably, or goes on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardwise.runtime.mpi.mpiexec import find_mpiexec

VICTIM, TRAINEE = (str(Path(__file__).with_name(name)) for name in ("victim.py", "trainee.py"))
END_SECONDS = 15.0
GRADIENT = r"gradient of \w+ of micro-batch 0 from rank 1"


@dataclass(frozen=True)
class Outcome:
    """Hold how a job ended."""

    code: int
    text: str
    seconds_after_start: float
    leftover: list[int]


def start(
    launcher: str, how: str, timeout: float = 120.0, script: str = VICTIM, plan: str = "", backend: str = ""
) -> subprocess.Popen[str]:
    commands = {
        "run mpi": [sys.executable, "-m", "shardwise.cli", "run", "-n", "2", "--launcher", "mpi"],
        "run torchrun": [sys.executable, "-m", "shardwise.cli", "run", "-n", "2", "--launcher", "torchrun"],
        "mpiexec": [find_mpiexec().path, "-n", "2", sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    }
    environment = os.environ | {
        "SHARDWISE_TIMEOUT": str(timeout),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if backend:
        environment["SHARDWISE_BACKEND"] = backend
    return subprocess.Popen(
        [*commands[launcher], script, how, *plan.split()],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], head: str = "") -> Outcome:
    try:
        text = head + process.communicate(timeout=60)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    end = time.time()
    began = max((float(found) for found in re.findall(r"at (\d+\.\d+)", text)), default=end)
    return Outcome(process.returncode, text, end - began, leftovers(text))


def leftovers(text: str) -> list[int]:
    """Return which of the ranks that printed their process number still exist, and end them."""
    pids = [int(found) for found in re.findall(r"pid (\d+)", text)]
    end = time.monotonic() + 3
    while (alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return alive


@pytest.mark.parametrize("launcher", ["run mpi", "run torchrun"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", ["rank 1", "killed"]),
        ("raise", ["rank 1 of 2 ends the job", "ValueError: a layer went wrong"]),
    ],
)
def test_one_rank_that_dies_or_raises_ends_the_job(launcher: str, how: str, words: list[str]) -> None:
    found = finish(start(launcher, how))
    assert found.code != 0
    assert found.seconds_after_start < END_SECONDS
    assert found.leftover == []
    for word in words:
        assert word in found.text
    assert "finished" not in found.text


@pytest.mark.parametrize(
    ("launcher", "how", "word"),
    [
        ("mpiexec", "exit", "rank 1 has already left the job"),
        # Starting a job costs seconds; the ways that differ least from those above run in the full suite.
        pytest.param("mpiexec", "raise", "rank 1 of 2 ends the job: ValueError", marks=pytest.mark.full),
        pytest.param("mpiexec", "kill", "signal 9", marks=pytest.mark.full),
        pytest.param("torchrun", "raise", "rank 1 of 2 ends the job: ValueError", marks=pytest.mark.full),
        pytest.param("torchrun", "kill", "Signal 9 (SIGKILL)", marks=pytest.mark.full),
    ],
)
def test_the_same_under_foreign_launchers(launcher: str, how: str, word: str) -> None:
    found = finish(start(launcher, how))
    assert found.code != 0
    assert found.seconds_after_start < END_SECONDS
    assert word in found.text
    assert found.leftover == []


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("sleep", "rank 1 made no progress for"),
        pytest.param("stop", "rank 1 gave no sign of life for", marks=pytest.mark.full),
        pytest.param("deadlock", "no rank it depends on can move any more", marks=pytest.mark.full),
    ],
)
def test_a_peer_without_progress_ends_the_job_and_everything_is_named(how: str, word: str) -> None:
    found = finish(start("run mpi", how, timeout=2.0))
    assert found.code != 0
    assert found.seconds_after_start < END_SECONDS
    assert re.search(r"rank 0: recv, peer rank 1, tensor \[2, 3\] float64", found.text)
    assert word in found.text
    assert found.leftover == []


@pytest.mark.parametrize(
    ("launcher", "how", "plan", "word"),
    [
        ("run mpi", "stop", "spatial=2x1", r"tiled readers of \w+"),
        ("run torchrun", "sleep", "stages=2 micro_batches=2", GRADIENT),
        pytest.param("run torchrun", "stop", "stages=2", GRADIENT, marks=pytest.mark.full),
        pytest.param("run torchrun", "sleep", "spatial=2x1", r"tiled readers of \w+", marks=pytest.mark.full),
        pytest.param("run mpi", "sleep", "stages=2", GRADIENT, marks=pytest.mark.full),
        pytest.param("run mpi", "sleep", "data=2", r"gradients of [^,]+", marks=pytest.mark.full),
        pytest.param("run torchrun", "sleep", "data=2", r"gradients of [^,]+", marks=pytest.mark.full),
    ],
)
def test_a_silent_rank_in_a_training_step_ends_the_job_and_everything_is_named(
    launcher: str, how: str, plan: str, word: str
) -> None:
    found = finish(start(launcher, how, 2.0, TRAINEE, plan))
    assert found.code != 0
    assert found.seconds_after_start < END_SECONDS
    assert re.search(rf"rank 0: {word}, peers \[1\], tensor \[[\d, ]+\] float32", found.text), found.text
    assert re.search(r"during (forward|backward|receive gradient|the update) of ", found.text), found.text
    assert re.search(
        r"rank 1 (made no progress|gave no sign of life) for \d+ s.*forward of stage", found.text
    )
    assert "finished" not in found.text
    assert found.leftover == []


@pytest.mark.full
def test_a_rank_that_does_not_come_to_a_new_group_is_named() -> None:
    found = finish(start("run mpi", "group", timeout=2.0))
    assert found.code != 0
    assert found.seconds_after_start < END_SECONDS
    assert "rank 0: new group of ranks [0, 1]: gave up after" in found.text
    assert "rank 1 made no progress for" in found.text
    assert found.leftover == []


@pytest.mark.parametrize("backend", ["mpi4py", pytest.param("gloo", marks=pytest.mark.full)])
def test_a_frozen_rank_that_keeps_the_store_ends_the_job_and_is_named(backend: str) -> None:
    found = finish(start("run mpi", "freeze", 2.0, TRAINEE, "stages=2", backend))
    assert found.code != 0
    assert found.seconds_after_start < END_SECONDS
    assert "rank 0, which keeps the heartbeats, gave no answer for 2 s" in found.text
    assert re.search(r"rank 1: \w+ of micro-batch 0 from rank 0, peers \[0\], tensor", found.text), found.text
    assert "finished" not in found.text
    assert found.leftover == []


def test_a_peer_in_a_long_computation_is_reported_and_left_alone() -> None:
    found = finish(start("run mpi", "compute", timeout=2.0))
    assert found.code == 0
    assert found.text.count("finished") == 2
    assert "rank 1 is alive, busy with" in found.text


@pytest.mark.full
def test_a_wait_that_was_given_up_and_forgiven_does_not_hold_up_the_end() -> None:
    found = finish(start("run mpi", "forgive"))
    assert found.code == 0
    assert found.text.count("finished") == 2
    assert found.seconds_after_start < END_SECONDS


def head_of(process: subprocess.Popen[str]) -> str:
    """Read until both ranks have printed their process numbers."""
    assert process.stdout is not None
    text = ""
    while text.count("pid ") < 2:
        line = process.stdout.readline()
        assert line, f"the job ended early:\n{text}"
        text += line
    return text


@pytest.mark.parametrize("launcher", ["run mpi", pytest.param("run torchrun", marks=pytest.mark.full)])
def test_an_interrupt_ends_all_ranks(launcher: str) -> None:
    process = start(launcher, "sleep")
    head = head_of(process)
    process.send_signal(signal.SIGINT)
    found = finish(process, head)
    assert found.code == 130
    assert "SIGINT" in found.text
    assert found.leftover == []


def test_ranks_end_when_their_launcher_is_killed() -> None:
    process = start("run torchrun", "sleep")
    head = head_of(process)
    process.kill()
    found = finish(process, head)
    assert found.code == -signal.SIGKILL
    assert found.leftover == []
