"""Run every measurement of the transport and write result.md: `python benchmarks/transport/run.py`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from switch import context_switch_seconds
from tables import (
    Bar,
    allreduce_table,
    bars_table,
    buckets_table,
    chain_table,
    halo_table,
    overlap_table,
    pairs_table,
    patterns_table,
)

from shardwise.runtime.mpi.mpiexec import find_mpiexec

HERE = Path(__file__).resolve().parent
CHAINS = (2, 4, 8)
BUSY = (
    "\n\n**Other programs kept the cores busy when this began: latencies and verdicts below measure them as "
    "much as the transport. Repeat on a quiet machine.**"
)


def launch(section: str, ranks: int, effort: float) -> list[dict[str, Any]]:
    """Run one section on so many ranks and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        command = [find_mpiexec().path, "-n", str(ranks), sys.executable, str(HERE / "measure.py")]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, section, str(effort), str(target)], check=True, env=environment)
        rows: list[dict[str, Any]] = json.loads(target.read_text())
        return rows


def bars(
    pairs: list[dict[str, Any]], halos: list[dict[str, Any]], chains: list[dict[str, Any]], switch: float
) -> list[Bar]:
    """Compare what was measured with what is asked for."""
    small = [row for row in pairs if row["bytes"] <= 512]
    large = [row for row in pairs if row["bytes"] >= 1 << 20]
    overhead = max(row["ours"] - row["raw"] for row in small) * 1e6
    slower = max(row["ours"] / row["raw"] for row in large)
    faster = min(row["gloo"] / row["ours"] for row in small)
    regrid = max(row["regrid"] / row["by hand"] for row in halos)
    hop = {row["ranks"]: row["ours"] for row in chains}
    return [
        Bar("overhead over raw mpi4py, up to 512 B", f"{overhead:.1f} us", "<= 25 us", overhead <= 25),
        Bar("time over raw mpi4py, from 1 MiB", f"{slower:.2f}x", "<= 1.10x", slower <= 1.10),
        Bar("latency below Gloo's, up to 512 B", f"{faster:.1f}x", ">= 10x", faster >= 10),
        Bar("halo by regrid over hand-written", f"{regrid:.2f}x", "<= 1.30x", regrid <= 1.3),
        Bar(
            "hop on 8 ranks over 1.3 hops on 2 plus a context switch",
            f"{hop[8] / (1.3 * hop[2] + switch):.2f}x",
            "<= 1.00x",
            hop[8] <= 1.3 * hop[2] + switch,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", type=float, default=1.0, help="scale of the number of rounds")
    parser.add_argument("--output", type=Path, default=HERE / "result.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    switch = context_switch_seconds()
    pairs = launch("pairs", 2, options.effort)
    reduced = launch("allreduce", 2, options.effort)
    overlapped = launch("overlap", 2, options.effort)
    halos = launch("halo", 2, options.effort)
    patterns = [row for size in (2, 4) for row in launch("patterns", size, options.effort)]
    buckets = launch("buckets", 2, options.effort)
    chains = [row for size in CHAINS for row in launch("chain", size, options.effort)]
    text = "\n\n".join(
        [
            "# Transport: results",
            f"`python benchmarks/transport/run.py --effort {options.effort:g}` on "
            f"{cores} cores, load average before {load_before:.1f}, context switch {switch * 1e6:.1f} us. "
            "Medians; transports take turns." + ("" if load_before < cores / 4 else BUSY),
            "## Bars\n\n" + bars_table(bars(pairs, halos, chains, switch)),
            "## Two ranks, one way\n\n" + pairs_table(pairs),
            "## All-reduce, 2 ranks\n\n" + allreduce_table(reduced),
            "## Halo exchange of a 64x512x512 tile, 2 ranks\n\n" + halo_table(halos),
            "## Overlap, 2 ranks\n\n" + overlap_table(overlapped),
            "## Token chain\n\n" + chain_table(chains),
            "## Regular regrids: messages against collectives\n\n" + patterns_table(patterns),
            "## A step of DistributedDataParallel, 2 ranks, 34 MB of gradients\n\n" + buckets_table(buckets),
        ]
    )
    options.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
