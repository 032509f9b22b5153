"""How much the speed of this machine's memory wavers: `python benchmarks/oracle/memory_speed.py [seconds]`.

Every core updates 32 million parameters under SGD with momentum, all at once, again and again. On a machine
that is shared, nothing that moves many bytes can be predicted better than this wavers.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from turns import launch  # noqa: E402  (found beside this folder)

PARAMETERS = 32 << 20


def main() -> None:
    """Start a rank per core and print how long an update took, second by second."""
    seconds = sys.argv[1] if len(sys.argv) > 1 else "120"
    times = launch(HERE / "memory_speed.py", 2, "gloo", "rank", seconds)["times"]
    tenths = statistics.quantiles(times, n=10)
    words = [f"{1e9 * t / PARAMETERS:.2f}" for t in (min(times), tenths[0], tenths[4], tenths[8], max(times))]
    print(f"# Nanoseconds per parameter, {len(times)} updates in {seconds} s on 2 ranks")
    print("\n| least | a tenth are below | median | a tenth are above | most |\n|---:|---:|---:|---:|---:|")
    print(f"| {' | '.join(words)} |")


def rank(seconds: str, target: str) -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist
    from turns import write

    import shardwise as sw

    sw.init()
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.ones(PARAMETERS))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1e-3, momentum=0.9)
    for _ in range(3):
        optimizer.step()
    times: list[float] = []
    flag = torch.ones(1)
    end = time.monotonic() + float(seconds)
    while flag:
        dist.barrier()
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
        time.sleep(0.1)
        # Rank 0 says when it is over.
        flag.fill_(time.monotonic() < end)
        dist.broadcast(flag, 0)
    write(target, {"times": times})
    sw.finalize()


if __name__ == "__main__":
    rank(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
