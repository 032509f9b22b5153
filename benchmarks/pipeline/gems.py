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


class Alone:
    """Time forward and backward of one stage on one micro-batch, as a step among the others.

    Two ranks at a time: so many compute at once in these schedules, whatever the number of stages is.
    """

    def __init__(self) -> None:
        self.model = nn.Sequential(*stage())
        self.forward: list[float] = []
        self.backward: list[float] = []

    def __call__(self) -> None:
        for pair in range(0, dist.get_world_size(), 2):
            dist.barrier()
            if dist.get_rank() not in (pair, pair + 1):
                continue
            x = torch.randn(SAMPLES, WIDTH, PIXELS, PIXELS, requires_grad=True)
            start = time.perf_counter()
            out = self.model(x)
            middle = time.perf_counter()
            out.backward(torch.ones_like(out))
            self.forward.append(middle - start)
            self.backward.append(time.perf_counter() - middle)

    def medians(self) -> tuple[float, float]:
        """Return the forward and backward seconds, the mean over the ranks."""
        # The first one binds and allocates.
        mine = (statistics.median(self.forward[1:]), statistics.median(self.backward[1:]))
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
    alone = Alone()
    steps: dict[str, Step] = {"alone": alone}
    rounds = {}
    for schedule, replication in (("gems-mast", 1), ("gems-master", 2)):
        count = 2 * replication
        x = torch.randn(SAMPLES * count, WIDTH, PIXELS, PIXELS)
        plan = f"stages={size} schedule={schedule} cuts={cuts}"
        plan += f" replication={replication}" if schedule == "gems-master" else ""
        trainer = sw.Trainer(model, (x, x), plan, loss=nn.functional.mse_loss)
        rounds[schedule] = count
        steps[schedule] = lambda t=trainer, x=x: t.step(x, x)
    found = in_turns(steps, repeats)
    forward, backward = alone.medians()
    rows = []
    for schedule, count in rounds.items():
        bound = count * size * (forward + backward) - (count - 1) * (size - 1) * min(forward, backward)
        rows.append(
            {
                "forward": forward,
                "backward": backward,
                "schedule": schedule,
                "rounds": count,
                "step": found[schedule],
                "bound": bound,
            }
        )
    write(target, {"rows": rows})
    sw.finalize()


if __name__ == "__main__":
    main()
