"""What the benchmarks share: start ranks on a script, and time steps in turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Step = Callable[[], object]
# The first steps bind and allocate, and find the memory that others gave back.
_UNTIMED = 3


def launch(script: Path, ranks: int, transport: str, *args: object) -> dict[str, Any]:
    """Run a script on local ranks; it writes JSON to the path that is its last argument."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "shardwise.cli", "run", "-n", str(ranks), "--backend", transport]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        words = [str(script), *map(str, args), str(target)]
        done = subprocess.run(
            [*command, *words], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(target.read_text())
        return found


def in_turns(steps: Mapping[str, Step], repeats: int, *, tidy: bool = False) -> dict[str, float]:
    """Return each step's median seconds on the slowest rank, all kinds taking turns; call on all ranks.

    Training goes on and on, so every timed step follows one of its kind, which finds caches and memory as the
    other kinds left them and does not count. Where memory is too short for what all kinds keep between steps,
    `tidy` turns give it back; each then has two steps that do not count and two that do.
    """
    import torch.distributed as dist

    from shardwise.runtime.heap import give_back

    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    untimed = 0 if tidy else _UNTIMED - 1
    before, counted = (2, 2) if tidy else (1, 1)
    for repeat in range(untimed + repeats):
        # Whoever comes first finds what the last one of the round before left; everybody is first in turn.
        order = order[1:] + order[:1]
        for name in order:
            if tidy:
                give_back()
            for turn in range(before + (counted if repeat >= untimed else 0)):
                dist.barrier()
                start = time.perf_counter()
                steps[name]()
                if turn >= before:
                    times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(found) for name, found in times.items()}
    gathered: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, medians)
    return {name: max(found[name] for found in gathered) for name in medians}


def write(target: str, rows: Mapping[str, Any]) -> None:
    """Let rank 0 write the result."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        Path(target).write_text(json.dumps(rows))


def conditions(command: str) -> str:
    """Say how and where a result was made."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    busy = "" if load < cores / 2 else " **Other programs kept the cores busy: repeat on a quiet machine.**"
    return f"`{command}` on {cores} cores, load average before {load:.1f}. Seconds per step, medians.{busy}"
