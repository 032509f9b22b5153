"""What a process that trains takes before the network's own tensors: libraries, capture, compiled kernels.

python -m shardwise.runtime.calibrate.baseline        trains something tiny, prints the resident bytes
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn


def baseline_bytes() -> float:
    """Return the resident memory of a fresh process after it trained something tiny; 0 if that fails."""
    words = [sys.executable, "-c", f"from {__name__} import main; main()"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else 0.0


def resident_bytes() -> float:
    """Return the memory that this process has now; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return 0.0
    return float(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Be the fresh process: train something tiny, print the resident bytes."""
    import shardwise.runtime.engine  # noqa: F401  (what ranks import)
    from shardwise.graph.capture import capture
    from shardwise.runtime.heap import give_back

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 4)
    )
    x = torch.randn(2, 3, 8, 8)
    capture(model, x, training=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.nn.functional.cross_entropy(model(x), torch.zeros(2, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    give_back()
    print(resident_bytes())
