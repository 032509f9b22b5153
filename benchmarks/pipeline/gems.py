"""The rank side: GEMS on equal stages against its bound from measured forward and backward times."""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from turns import Step, in_turns, write

import shardwise as sw

WIDTH, PIXELS, SAMPLES, DEPTH = 32, 96, 2, 4


def stage() -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
    return layers


def seconds(repeats: int) -> tuple[float, float]:
    """Return forward and backward seconds of one stage on one micro-batch.

    Two ranks at a time: so many compute at once in these schedules, whatever the number of stages is.
    """
    model = nn.Sequential(*stage())
    forward, backward = [], []
    for repeat in range(repeats + 1):
        for pair in range(0, dist.get_world_size(), 2):
            dist.barrier()
            if dist.get_rank() not in (pair, pair + 1):
                continue
            x = torch.randn(SAMPLES, WIDTH, PIXELS, PIXELS, requires_grad=True)
            start = time.perf_counter()
            out = model(x)
            middle = time.perf_counter()
            out.backward(torch.ones_like(out))
            if repeat:
                forward.append(middle - start)
                backward.append(time.perf_counter() - middle)
    mine = (statistics.median(forward), statistics.median(backward))
    gathered = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return statistics.mean(f for f, _ in gathered), statistics.mean(b for _, b in gathered)


def main() -> None:
    repeats, target = int(sys.argv[1]), sys.argv[2]
    sw.init()
    torch.set_num_threads(1)
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(size) for layer in stage()))
    cuts = ",".join(str(i * 2 * DEPTH) for i in range(1, size))
    steps: dict[str, Step] = {}
    rounds = {}
    for schedule, replication in (("gems-mast", 1), ("gems-master", 2)):
        count = 2 * replication
        x = torch.randn(SAMPLES * count, WIDTH, PIXELS, PIXELS)
        plan = f"stages={size} schedule={schedule} cuts={cuts}"
        plan += f" replication={replication}" if schedule == "gems-master" else ""
        trainer = sw.Trainer(model, (x, x), plan, loss=nn.functional.mse_loss)
        rounds[schedule] = count
        steps[schedule] = lambda t=trainer, x=x: t.step(x, x)
    forward, backward = seconds(repeats)
    found = in_turns(steps, repeats)
    rows = []
    for schedule, count in rounds.items():
        bound = count * size * (forward + backward) - (count - 1) * (size - 1) * min(forward, backward)
        rows.append({"schedule": schedule, "rounds": count, "step": found[schedule], "bound": bound})
    write(target, {"rows": rows})
    sw.finalize()


if __name__ == "__main__":
    main()
